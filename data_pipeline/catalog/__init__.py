"""The catalogue of sources: versions, their states, who changed what, which run used what."""

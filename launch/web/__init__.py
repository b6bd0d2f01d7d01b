"""The web page of the data platform, which shows sources and their catalogue entries."""

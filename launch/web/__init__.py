"""The web page of the data platform: looks at sources, and at what the catalogue says of them."""

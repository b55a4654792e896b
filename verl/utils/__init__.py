"""Import paths that tutorials use; everything here is defined elsewhere and re-exported."""

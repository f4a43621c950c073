"""The page of retuned recipes."""

"""Searches over a transducer: a predictor of what was said, joined to what is heard."""

"""Hostile clients against a live server: `python -m benchmarks.chaos --minutes 10`.

The program starts its own server on 127.0.0.1 and exits 0 only if every stream came back, every
behaving client got its exact text and nothing grew. `scenarios` holds the shorter runs.
"""

"""The Python half of fused transforms: what they are (`translating.py`), and what goes with
an image (`following.py`)."""

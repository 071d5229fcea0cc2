"""Examples that can be read and run: `python examples/train_bytes.py`, or as quaver.examples."""

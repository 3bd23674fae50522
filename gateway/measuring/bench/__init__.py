"""Load on a served model, and its measured speed."""

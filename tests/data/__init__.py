"""Data directories that released formats have written, and what is in them."""

"""One script per published number. Each runs by itself: ``python benchmarks/log_path.py --quick``."""

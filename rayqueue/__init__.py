"""RayQueue: a fault-tolerant, Kafka-like message queue made of Ray actors.

Importing this package is cheap: it loads neither Ray nor Arrow.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]

"""The cluster's state: topics, placement, brokers, producer ids, consumer groups. No clocks, no I/O but the store."""

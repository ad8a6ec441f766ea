"""A replica at work: the engine's thread, its clients, the tail, and what it tells about itself. No Ray in here."""

"""Models that come with shardwise. They are plain NNX modules and import nothing of it."""

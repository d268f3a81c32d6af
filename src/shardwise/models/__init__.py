"""Models that come with shardwise. They are plain NNX modules; of shardwise they use at most `constrain`, which does nothing elsewhere."""

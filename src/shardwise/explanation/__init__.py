"""`shardwise explain`: what an optimizer does to each parameter, and likely mistakes in it."""

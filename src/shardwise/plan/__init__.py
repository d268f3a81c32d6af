"""`shardwise plan`: memory, FLOPs, collectives and step time from the compiled step."""

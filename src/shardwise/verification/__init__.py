"""`shardwise verify`: the same run on one device and on meshes, compared."""

"""`shardwise doctor`: checks of the machine, the environment and a run directory."""

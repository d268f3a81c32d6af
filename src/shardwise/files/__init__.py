"""Regular files, atomic writes, logs of lines, manifests, locks, fail points, the cache folder."""

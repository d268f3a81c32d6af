"""One of several processes that make the same meshes and record the process of each device.

python meshes.py COORDINATOR COUNT INDEX DEVICES FILE MESH...
"""

import json
import sys
from pathlib import Path

from shardwise import make_mesh, use_cpu_devices
from shardwise.cluster.group import start_group
from shardwise.cluster.signals import Stop
from shardwise.cluster.watch import Watch


def main(
    coordinator: str, count: str, index: str, devices: str, file: str, *meshes: str
) -> None:
    use_cpu_devices(int(devices))
    group = start_group(coordinator, int(count), int(index))
    with Watch(group, Stop()):
        found = {
            text: [
                [device.process_index for device in row]
                for row in make_mesh(text).devices
            ]
            for text in meshes
        }
    Path(file).write_text(json.dumps({"hosts": group.hosts, "meshes": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])

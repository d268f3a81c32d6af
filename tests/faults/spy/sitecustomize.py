"""Log the file, socket and pickle operations of a process that has this on PYTHONPATH."""

import os
import sys


def _spy_on_calls(path: str) -> None:
    """Log os.fsync, os.rename and os.replace in order, with their paths."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def say(*words: object) -> None:
        os.write(handle, ("\t".join(map(str, words)) + "\n").encode())

    def spying_fsync(descriptor: int) -> None:
        fsync(descriptor)
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        say("fsync", os.readlink(f"/proc/self/fd/{number}"))

    def spying_rename(source: object, target: object, **options: object) -> None:
        rename(source, target, **options)
        say("rename", source, target)

    def spying_replace(source: object, target: object, **options: object) -> None:
        replace(source, target, **options)
        say("replace", source, target)

    os.fsync, os.rename, os.replace = spying_fsync, spying_rename, spying_replace


EVENTS = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.bind",
)
CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
)


def _spy_on_events(path: str) -> None:
    """Log the audit events that a hostile file could cause when it is loaded."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            name, _, flags = arguments
            if (
                isinstance(flags, int)
                and flags & (os.O_WRONLY | os.O_RDWR)
                and isinstance(name, str | bytes)
            ):
                follow = os.path.abspath if flags & os.O_NOFOLLOW else os.path.realpath
                os.write(handle, f"write\t{follow(os.fsdecode(name))}\n".encode())
        elif event in CHANGES and not isinstance(arguments[0], int):
            os.write(
                handle,
                f"change\t{os.path.abspath(os.fsdecode(arguments[0]))}\n".encode(),
            )
        elif event in EVENTS:
            os.write(handle, f"{event}\t{arguments!r}\n".encode())

    sys.addaudithook(hook)


if "SPY_CALLS" in os.environ:
    _spy_on_calls(os.environ["SPY_CALLS"])
if "SPY_EVENTS" in os.environ:
    _spy_on_events(os.environ["SPY_EVENTS"])

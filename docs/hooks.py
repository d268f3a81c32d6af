"""For the site: links that lead out of docs/, to code, become the name of the file they lead to."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(
        r"\[([^\]]+)\]\(\.\./((?:src|tests|examples|recipes|benchmarks|[A-Z]+\.md)[^)]*)\)",
        r"\1 (`\2`)",
        markdown,
    )

"""For mkdocs: the beginning of the home page, which is that of README.md, and links of the docs to
files outside of docs/, which are right on a git server.

The site does not hold those files. A link to one becomes its text, or a link to ``repo_url`` if
mkdocs.yml sets it. A link to a file that is not in the repository is a warning, and so ends the
strict build.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

logger = logging.getLogger("mkdocs.docs_hooks")

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")
BEGINNING = "<!-- On the site, the beginning of README.md comes here. -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links of one page that leave docs/."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent
    if BEGINNING in markdown:
        readme = (docs.parent / "README.md").read_text()
        text = readme.split("# KVBoost\n")[1].split("\n## Try it\n")[0]
        text = re.sub(r"\]\((?!\w+:|docs/|#)", "](../", text).replace("](docs/", "](")
        markdown = markdown.replace(BEGINNING, text)

    def rewrite(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path = (folder / target.partition("#")[0]).resolve()
        if path.is_relative_to(docs):
            return link[0]
        if not path.exists():
            logger.warning("%s links to %s, which is not there", page.file.src_uri, target)
        if not config["repo_url"]:
            return text
        inside = path.relative_to(docs.parent).as_posix()
        return f"[{text}]({config['repo_url'].rstrip('/')}/blob/HEAD/{inside})"

    return LINK.sub(rewrite, markdown)

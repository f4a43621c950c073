"""Settings of the documentation site. Sphinx reads the pages in this folder; ``scripts/build_docs.sh`` builds them."""

from __future__ import annotations

import os
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

import megatron.schedules

ROOT = Path(__file__).resolve().parents[1]
# Where links to files outside this folder lead: a code host, or the files of this checkout.
SOURCE_URL = os.environ.get("DOCS_SOURCE_URL", ROOT.as_uri()).rstrip("/")

project = "megatron-schedules"
author = copyright = "The megatron-schedules authors"
release = megatron.schedules.__version__

# autodoc sees only what is there, not what the package imports when it is asked for.
vars(megatron.schedules).update({name: getattr(megatron.schedules, name) for name in megatron.schedules.__all__})

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
suppress_warnings = [
    "misc.highlighting_failure",  # <placeholders> in commands
    "ref.python",  # type hints name classes without their module, and some names occur twice
]

html_theme = "pydata_sphinx_theme"
html_title = f"{project} {release}"
html_sidebars = {"**": ["globaltoc.html"]}  # all sections on every page
html_theme_options = {
    "globaltoc_maxdepth": 1,
    "navbar_center": [],
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
}


class RepositoryLinks(SphinxTransform):
    """Turns relative links that leave this folder into links to the repository."""

    default_priority = 10

    def apply(self, **_: object) -> None:
        for node in list(self.document.findall(_is_relative_link)):
            folder = Path(self.env.doc2path(self.env.docname)).parent
            path = Path(os.path.normpath(folder / node["reftarget"].partition("#")[0]))
            if node.get("refdomain") == "doc":
                path = path.with_name(f"{path.name}.md")
            if path.is_relative_to(self.env.srcdir) or not path.is_relative_to(ROOT):
                continue
            if not path.exists():
                logging.getLogger(__name__).warning("link to a file that does not exist: %s", path, location=node)
            link = nodes.reference("", "", *node.children, refuri=f"{SOURCE_URL}/{path.relative_to(ROOT)}")
            node.replace_self(link)


def _is_relative_link(node: nodes.Node) -> bool:
    return isinstance(node, addnodes.download_reference | addnodes.pending_xref) and node.get("reftype") == "myst"


def setup(app: Sphinx) -> None:
    app.add_transform(RepositoryLinks)

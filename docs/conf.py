"""Settings of the documentation site. Sphinx reads the pages in this folder; ``scripts/build_docs.sh`` builds them."""

from __future__ import annotations

import os
import pkgutil
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

import megatron.schedules
from megatron.schedules.utils.json_files import Form

ROOT = Path(__file__).resolve().parents[1]
# Where links to files outside this folder lead: a code host, or the files of this checkout.
SOURCE_URL = os.environ.get("DOCS_SOURCE_URL", ROOT.as_uri()).rstrip("/")
# Files outside this folder that are pages of the site, and those pages.
INCLUDED = {"examples/slurm/README.md": "slurm"}

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
            if page := INCLUDED.get(path.relative_to(ROOT).as_posix()):
                node["reftarget"] = page
                continue
            if not path.exists():
                logging.getLogger(__name__).warning("link to a file that does not exist: %s", path, location=node)
            link = nodes.reference("", "", *node.children, refuri=f"{SOURCE_URL}/{path.relative_to(ROOT)}")
            node.replace_self(link)


def _is_relative_link(node: nodes.Node) -> bool:
    return isinstance(node, addnodes.download_reference | addnodes.pending_xref) and node.get("reftype") == "myst"


class Room(Directive):
    """``.. room:: NAME`` documents every module of ``megatron.schedules.NAME`` from its docstrings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        room = import_module(f"megatron.schedules.{self.arguments[0]}")
        text = []
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if not module.ispkg:
                title = module.name.removeprefix("megatron.schedules.")
                text += [title, "-" * len(title), "", f".. automodule:: {module.name}", "   :members:", ""]
        section = nodes.section()
        section.document = self.state.document
        self.state.nested_parse(StringList(text, source=__file__), 0, section, match_titles=True)
        return section.children


def _skip_forms(_app: Sphinx, _what: str, _name: str, member: object, skip: bool, _options: object) -> bool | None:
    """Leaves out the forms of JSON files: plan-json.md describes them, and their generic fields have no signature."""
    return True if isinstance(member, type) and issubclass(member, Form) else None


def setup(app: Sphinx) -> None:
    app.add_transform(RepositoryLinks)
    app.add_directive("room", Room)
    app.connect("autodoc-skip-member", _skip_forms)

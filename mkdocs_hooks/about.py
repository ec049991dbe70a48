"""What `pyproject.toml` says of the package ─► the version in the footer of each page, and links to
edit it."""

import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Called by MkDocs before it builds."""
    text = (Path(config.config_file_path).parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    config.copyright = f"The documentation of functree {project['version']}"
    repository = project.get("urls", {}).get("Repository")
    if repository is not None:
        # Not by `repo_url`: for a repository at GitHub, the theme then asks its API for the stars.
        config.edit_uri_template = f"{repository}/edit/main/docs/{{path}}"
        config.theme["features"].append("content.action.edit")
    return config

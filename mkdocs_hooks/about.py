"""This hook adds the version from `pyproject.toml` and edit links to each page."""

import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the version and the edit links to the configuration, before MkDocs builds."""
    text = (Path(config.config_file_path).parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    config.copyright = f"The documentation of functree {project['version']}"
    repository = project.get("urls", {}).get("Repository")
    if repository is not None:
        # With `repo_url`, the theme would query GitHub's API for the number of stars.
        config.edit_uri_template = f"{repository}/edit/main/docs/{{path}}"
        config.theme["features"].append("content.action.edit")
    return config

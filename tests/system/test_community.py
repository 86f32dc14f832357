"""What a host reads of the repository itself: the citation, and the forms of issues."""

import re
from pathlib import Path

import pytest

import mha_c
import needs

yaml = needs.module("yaml")
ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KEYS = {
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "input": {"label", "description", "placeholder", "value"},
}


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_has_what_version_1_2_0_of_its_format_asks_for():
    found = read(ROOT / "CITATION.cff")
    assert found["cff-version"] == "1.2.0" and found["type"] == "software"
    assert found["message"] and found["title"].startswith("mha_c")
    (book,) = found["references"]
    for work in (found, book):
        assert work["title"] and work["authors"]
        for author in work["authors"]:
            assert set(author) in ({"name"}, {"family-names", "given-names"}) and all(author.values())
    assert (
        {"type", "title", "authors"} <= set(book)
        and isinstance(book["year"], int)
        and set(book["publisher"]) == {"name"}
    )
    assert f'license = "{found["license"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_a_form_of_an_issue_is_one(form):
    found = read(form)
    assert set(found) == {"name", "description", "labels", "body"} and all(found.values())
    ids = [field["id"] for field in found["body"]]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[\w-]+", one) for one in ids)
    for field in found["body"]:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert set(field["attributes"]) <= KEYS[field["type"]] and field["attributes"]["label"]
        assert field.get("validations", {"required": True}) == {"required": True}
    assert set(read(form.with_name("config.yml"))) <= {"blank_issues_enabled", "contact_links"}


def test_the_form_of_a_bug_asks_for_the_configuration():
    asked = {field["id"]: field["attributes"] for field in read(ROOT / ".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "mha_c.show_config()" in asked["config"]["description"] and callable(mha_c.show_config)

"""Pages in Chinese: the boxes, links, figures and sections of the English ones, and the terms of the book's edition."""

import os
import re
from pathlib import Path

import pytest

import needs
from mha_c import masked_softmax, teach

ROOT = Path(__file__).resolve().parents[2]
PAGES = {f"docs/zh/{name}.md": f"docs/{name}.md" for name in ("start", "check", "from-d2l")}
PAGES["README.zh-CN.md"] = "README.md"
BOX = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OTHER_WORDS = {  # d2l-zh's word, and what other books say instead
    "词元": "令牌|标记符", "暂退法": "丢弃法|随机失活", "批量": "批次", "评分": "得分", "掩蔽": "掩膜|遮罩|遮住|遮蔽",
    "单元格": "代码块", "汇聚": "池化", "隐藏单元": "隐含单元", "键": "关键字", "多头注意力": "多头关注",
}  # fmt: skip


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page):
    return BOX.sub("", text(page))


def links(page):
    """Where a page leads to, pages with a translation by the name of their original; pictures, too."""
    found = {os.path.normpath(Path(page).parent / link) for link in re.findall(r"\]\(([^):]+)\)", prose(page))}
    found = {PAGES.get(link, link) for link in found}
    return found - {"README.md", "README.zh-CN.md", PAGES.get(page, page)}


def shape(page):
    """Levels of headings, and rows of tables."""
    return re.findall(r"^(#+) ", prose(page), re.MULTILINE), len(re.findall(r"^\|", prose(page), re.MULTILINE))


@pytest.fixture(params=PAGES)
def page(request):
    return request.param


def test_every_page_in_another_language_has_its_original():
    there = {"README.zh-CN.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "zh").glob("*.md"))}
    assert there == {*PAGES}


def test_boxes_are_those_of_the_english_page(page):
    boxes = BOX.findall(text(page))
    assert boxes == BOX.findall(text(PAGES[page])) and len(boxes) >= 4


def test_links_sections_and_tables_are_those_of_the_english_page(page):
    assert links(page) == links(PAGES[page])
    assert shape(page) == shape(PAGES[page])


def test_figures_names_and_addresses_are_those_of_the_english_page(page):
    english, chinese = prose(PAGES[page]), prose(page)
    assert {x for x in re.findall(r"\d+\.\d[.\d]*\d|\d+\.\d", english)} <= {*re.findall(r"\d+(?:\.\d+)+", chinese)}
    assert {x for x in re.findall(r"`([^`\n]+)`", english)} <= {*re.findall(r"`([^`\n]+)`", chinese)}


def test_no_star_of_an_emphasis_stands_on_the_page(page):
    """Markdown ends no emphasis between a sign of punctuation and a letter, as Chinese has them side by side."""
    parser = needs.module("markdown_it").MarkdownIt("commonmark").enable("table")
    parts = [part for block in parser.parse(text(page)) for part in block.children or ()]
    assert len(parts) > 20
    assert [part.content for part in parts if part.type == "text" and "*" in part.content] == []


def test_each_leads_to_the_other(page):
    back = os.path.relpath(PAGES[page], Path(page).parent)
    assert text(page).splitlines()[1] == f"[English]({back})"
    assert text("README.md").splitlines()[1] == "[中文](README.zh-CN.md)"


def test_terms_are_those_of_the_books_chinese_edition(page):
    said = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(page))
    assert [found for others in OTHER_WORDS.values() for found in re.findall(others, said)] == []
    sentences = (ROOT / "mha_c" / "teach" / "words" / "languages" / "zh.txt").read_text(encoding="utf-8")
    chinese = "".join(line for line in sentences.splitlines() if re.search("[\u4e00-\u9fff]", line))
    assert [found for others in OTHER_WORDS.values() for found in re.findall(others, chinese)] == []


def test_no_space_stands_where_a_line_of_chinese_was_broken(page):
    assert re.findall(r"[\u4e00-\u9fff，。：；？！][ \n][\u4e00-\u9fff]", prose(page)) == []


def test_the_answer_in_chinese_is_what_check_says():
    def attention(queries, keys, values, valid_lens=None):
        scores = queries @ keys.swapaxes(1, 2) / queries.shape[-1]
        return masked_softmax(scores, valid_lens) @ values

    teach.set_language("zh")
    try:
        first = str(teach.check(attention)).splitlines()[0]
    finally:
        teach.set_language("en")
    assert f"“{first}”" in text("README.zh-CN.md")

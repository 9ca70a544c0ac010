import json
import shutil

import pytest

from command import ROOT, refused, succeeds
from test_tables import results
from vmd.config import InvalidInput
from vmd.experiments import report
from vmd.experiments.report import MARKER, update_readme
from vmd.experiments.tables import merged_table, provenance
from vmd.terminal import to_markdown

README = """# Title

Before.

<!-- results:four-token -->
old text
<!-- end of results -->

After.
"""


@pytest.fixture
def project(tmp_path):
    """A README with a section, and results for it."""
    (tmp_path / "README.md").write_text(README)
    save(tmp_path, results())
    return tmp_path


def save(project, run, name: str = "four-token"):
    run |= {"command": f"vmd reproduce {name}", "hardware": {"name": "abacus"}, "seconds": 12.3, "seeds": [0, 1]}
    folder = project / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(run))


def update(project) -> tuple[bool, str]:
    changed = update_readme(project / "README.md", project / "results")
    return changed, (project / "README.md").read_text()


def test_the_text_between_the_markers_is_the_table(project):
    changed, text = update(project)
    assert changed
    assert "old text" not in text
    assert to_markdown(*merged_table([results()])) in text
    assert "| D1 | 2 | 2 | 10.1 % · 2.298 | 10.00" in text
    assert "`vmd reproduce four-token`: abacus, 12 s for everything, 2 seeds." in text


def test_systems_made_in_several_goes_say_so_each():
    one = {"command": "vmd reproduce sudoku --only a", "hardware": {"name": "abacus"}}
    two = {"command": "vmd reproduce sudoku --only b", "hardware": {"name": "slide rule"}}
    about = {"command": "vmd", "hardware": {"name": "loom"}, "seconds": 12.3, "seeds": [0]}
    alone = "`vmd reproduce sudoku --only a`: abacus, 12 s of training and measuring, one seed a row.\n"
    assert provenance(about | {"systems": {"a": one}}) == alone
    assert provenance(about | {"systems": {"a": {}}}) == "`vmd`: loom, 12 s of training and measuring, one seed a row.\n"
    assert provenance(about | {"systems": {"a": one, "b": two, "c": one}}) == (
        "`vmd reproduce sudoku --only SYSTEM`: abacus (a; c).\n`vmd reproduce sudoku --only SYSTEM`: slide rule (b).\n"
        "Together 12 s of training and measuring, one seed a row.\n"
    )


def test_commands_that_differ_in_their_systems_are_one():
    """However these are quoted, in how many goes and wherever they were written; the others stay apart."""
    machine = {"hardware": {"name": "abacus"}}
    about = {"command": "vmd", "hardware": {"name": "loom"}, "seconds": 12.3, "seeds": [0]}
    first, second, third = (
        {"command": f"vmd reproduce text {words}"} | machine
        for words in (
            "--only AR --out a",
            """--only 'the paper'"'"'s VMD, r = 4' --out b --only SEDD --resume""",
            "--device cpu",
        )
    )
    told = provenance(about | {"systems": {"AR": first, "VMD": second}})
    assert told == "`vmd reproduce text --only SYSTEM`: abacus, 12 s of training and measuring, one seed a row.\n"
    assert provenance(about | {"systems": {"AR": first, "VMD": second, "MDLM": third}}) == (
        "`vmd reproduce text --only SYSTEM`: abacus (AR; VMD).\n`vmd reproduce text --device cpu`: abacus (MDLM).\n"
        "Together 12 s of training and measuring, one seed a row.\n"
    )


def test_the_rest_stays(project):
    _, text = update(project)
    assert text.startswith("# Title\n\nBefore.\n\n<!-- results:four-token -->\n")
    assert text.endswith("<!-- end of results -->\n\nAfter.\n")


def test_a_second_time_changes_nothing(project):
    _, first = update(project)
    assert update(project) == (False, first)


def test_new_results_replace_old_ones(project):
    _, old = update(project)
    newer = results()
    newer["rows"][3]["value"] = 99.99
    save(project, newer)
    changed, text = update(project)
    assert changed
    assert text == old.replace("98.76", "99.99")


def test_every_section_gets_its_own_table(project):
    two = results()
    two["rows"] = two["rows"][-1:]
    save(project, two, "two-token")
    (project / "README.md").write_text(README + README.replace("four-token", "two-token"))
    _, text = update(project)
    four, two = [match.group(0) for match in MARKER.finditer(text)]
    assert "| D1 |" in four
    assert "| D1 |" not in two
    assert "| p = 0.3 |" in two


def test_the_papers_settings_are_added_once_they_have_been_run(project):
    save(project, results("paper"), "four-token-paper")
    _, text = update(project)
    assert "VMD paper's settings, argmax" in text


def test_only_pictures_that_exist_are_shown(project):
    assert "![" not in update(project)[1]
    (project / "results" / "four-token" / "four-token.png").touch()
    assert "](results/four-token/four-token.png)\n" in update(project)[1]


def test_a_readme_without_markers_stays(project):
    (project / "README.md").write_text("no markers\n")
    assert update(project) == (False, "no markers\n")


def test_missing_results_are_named(project):
    shutil.rmtree(project / "results" / "four-token")
    with pytest.raises(InvalidInput, match="vmd reproduce four-token"):
        update(project)
    assert (project / "README.md").read_text() == README


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "four-token"}'])
def test_damaged_results_are_one_line_and_the_readme_stays(project, content):
    path = project / "results" / "four-token" / "results.json"
    path.write_text(content)
    words = ("report", "--readme", project / "README.md", "--results", project / "results")
    assert "results.json" in refused(*words, folder=project)


def damage_one(run):
    del run["rows"][0]["value"]


def damage_all(run):
    run["rows"] = [3]


@pytest.mark.parametrize("damage", [damage_one, damage_all, None], ids=["a row", "rows", "missing"])
@pytest.mark.parametrize("name", ["a-first", "z-last"])
def test_nothing_is_renewed_if_a_part_cannot_be(project, damage, name):
    """Wherever it stands: neither the tables of the other results, nor their pictures, nor the README."""
    if damage is not None:
        run = results()
        damage(run)
        save(project, run, name)
    (project / "README.md").write_text(README + README.replace("four-token", name))
    words = ("report", "--readme", project / "README.md", "--results", project / "results")
    assert f"{name}/results.json: " in refused(*words, folder=project)
    save(project, results(), name)
    succeeds(*words)
    assert (project / "README.md").read_text().count("| D1 |") >= 2


@pytest.mark.parametrize("content", ["{}", "[]", '{"command": 1}'])
def test_a_damaged_bench_is_one_line(project, content):
    (project / "results/bench-train").mkdir()
    (project / "results/bench-train/text.json").write_text(content)
    (project / "README.md").write_text(README + README.replace("four-token", "bench-train"))
    words = ("report", "--readme", project / "README.md", "--results", project / "results")
    assert "bench-train/text.json: damaged" in refused(*words, folder=project)


def test_damaged_heatmaps_are_one_line(project):
    (project / "results/four-token/heatmaps.json").write_text('{"d1": {}}')
    words = ("report", "--readme", project / "README.md", "--results", project / "results")
    assert "four-token: damaged (KeyError: 'truth')" in refused(*words, folder=project)


@pytest.mark.parametrize("where", [0, 1])
def test_a_section_without_its_end_is_refused(project, where):
    """Or the text up to the next end would go with it."""
    parts = [README, README]
    parts[where] = parts[where].replace("<!-- end of results -->\n", "")
    (project / "README.md").write_text("".join(parts))
    words = ("report", "--readme", project / "README.md", "--results", project / "results")
    told = refused(*words, folder=project)
    assert "<!-- results:four-token -->: expected an <!-- end of results --> of its own after it" in told


def test_a_readme_that_is_no_text_is_one_line(project):
    (project / "README.md").write_bytes(b"\xff")
    words = ("report", "--readme", project / "README.md", "--results", project / "results")
    assert "README.md: expected text in UTF-8" in refused(*words, folder=project)


def test_results_may_lie_outside_the_readmes_folder(project):
    (project / "docs").mkdir()
    (project / "README.md").rename(project / "docs" / "README.md")
    (project / "results" / "four-token" / "four-token.png").touch()
    assert update_readme(project / "docs" / "README.md", project / "results")
    assert "](../results/four-token/four-token.png)" in (project / "docs" / "README.md").read_text()


def test_the_command_draws_and_updates(project):
    words = ("report", "--readme", project / "README.md", "--results", project / "results")
    first, second = succeeds(*words), succeeds(*words)
    assert first.out == second.out == ""
    assert first.err.endswith("README.md: updated\n")
    assert second.err.endswith("README.md: unchanged\n")
    assert "four-token.png" in (project / "README.md").read_text()
    assert (project / "results" / "four-token" / "four-token.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_is_what_the_results_say(monkeypatch):
    readme = ROOT / "README.md"
    if not readme.exists() or not MARKER.search(readme.read_text()):
        pytest.skip("the README has no results yet")
    monkeypatch.setattr(report, "write_atomically", lambda path, text: None)
    assert not update_readme(readme, ROOT / "results"), "run `vmd report`"

from vmd.experiments.tables import (
    accuracy_and_kl,
    data_name,
    detail_table,
    find,
    merged_table,
    number,
    printed,
    summary_table,
)
from vmd.terminal import print_table, to_markdown


def row(metric: str, value: float, system: str = "VMD", paper: float | None = None, preset: str = "ours", **setting) -> dict:
    usual = {"data": "d1", "block": 2, "steps": 1, "nfe": 2, "order": "prob", "rule": "argmax", "z": "once", "n": 1_000}
    usual |= {"z": "none"} if system == "MDM" else {}
    full = {"preset": preset} | usual | setting
    return {"system": system, "setting": full, "metric": metric, "value": value, "stderr": 0.01, "paper": paper}


def results(preset: str = "ours") -> dict:
    rows = [
        row("accuracy", 10.0, "MDM", 10.1, preset, rule="sample"),
        row("kl", 2.3, "MDM", 2.298, preset, rule="sample"),
        row("kl_exact", 2.31, "MDM", 2.298, preset, rule="sample", n=1),
        row("accuracy", 98.76, paper=94.2, preset=preset),
        row("kl", 0.0123, paper=0.068, preset=preset),
        row("accuracy", 79.0, paper=94.2, preset=preset, rule="sample"),
        row("kl", 0.25, paper=0.068, preset=preset, rule="sample"),
        row("kl", 0.9, preset=preset, steps=2, nfe=4, z="fresh"),
        row("kl", 0.1, preset=preset, steps=2, nfe=4),
        row("kl", 0.031, preset=preset, data="dependence-0.3", nfe=1),
    ]
    return {"name": "four-token", "preset": preset, "rows": rows}


def test_data_are_named_as_in_the_paper():
    assert [data_name(name) for name in ("d1", "d2", "non-uniform", "dependence-0.3")] == [
        "D1",
        "D2",
        "non-uniform",
        "p = 0.3",
    ]


def test_numbers_show_their_error_where_there_is_one():
    assert (number(1.2345, 2), number(1.2345, 2, 0.056), number(None, 2)) == ("1.23", "1.23 ± 0.06", "")


def test_a_row_is_found_by_setting_system_and_metric():
    rows = results()["rows"]
    assert find(rows, system="VMD", metric="kl", steps=2, z="once")["value"] == 0.1
    assert find(rows, system="VMD", metric="kl", steps=2, z="fresh")["value"] == 0.9
    assert find(rows, system="VMD", metric="kl", steps=3) is None


def test_a_cell_holds_accuracy_and_kl():
    rows = results()["rows"]
    accuracy, kl = accuracy_and_kl(rows, system="VMD", data="d1", steps=1, rule="argmax").split(" · ")
    assert accuracy.startswith("98.76")
    assert accuracy.endswith(" %")
    assert kl.startswith("0.012")
    assert accuracy_and_kl(rows, system="VMD", data="dependence-0.3").startswith("0.031")
    assert accuracy_and_kl(rows, system="VMD", data="d2") == ""


def test_a_printed_cell_holds_the_papers_figures():
    rows = results()["rows"]
    assert printed(rows, system="VMD", data="d1", steps=1, rule="argmax") == "94.2 % · 0.068"
    assert printed(rows, system="VMD", data="dependence-0.3") == ""


def test_the_summary_has_a_line_for_each_place_of_the_papers_table():
    headers, lines = summary_table(results())
    assert headers == [
        "data",
        "blocks",
        "NFE",
        "MDM, printed",
        "MDM",
        "VMD, printed",
        "VMD ours, argmax",
        "VMD ours, sample",
    ]
    assert [line[:3] for line in lines] == [["D1", "2", "2"], ["D1", "2", "4"], ["p = 0.3", "1", "1"]]
    assert [line[3] for line in lines] == ["10.1 % · 2.298", "", ""]
    assert [line[5] for line in lines] == ["94.2 % · 0.068", "", ""]
    assert [[cell[:5] for cell in (line[4], *line[6:])] for line in lines] == [
        ["10.00", "98.76", "79.00"],
        ["", "0.100", ""],  # and not 0.9, of fresh latents
        ["", "0.031", ""],
    ]


def test_the_papers_settings_stand_beside_ours():
    headers, lines = merged_table([results(), results("paper")])
    assert headers[6:] == [f"VMD {which}, {rule}" for which in ("paper's settings", "ours") for rule in ("argmax", "sample")]
    assert len(lines) == 3
    assert all(len(line) == len(headers) for line in lines)


def test_the_details_show_every_row():
    given = results()
    headers, lines = detail_table(given)
    assert len(lines) == len(given["rows"])
    assert all(len(line) == len(headers) for line in lines)
    assert lines[1][-3:] == ["KL, nats", "2.3000 ± 0.0100", "2.298"]


def test_the_papers_figure_stands_beside_comparable_rows_only():
    lines = detail_table(results())[1]
    assert lines[2][-3:] == ["exact KL, nats", "2.3100 ± 0.0100", ""]
    fresh = results() | {"rows": [row("kl", 0.9, paper=0.012, steps=2, z="fresh"), row("kl", 0.1, paper=0.012, steps=2)]}
    assert [line[-1] for line in detail_table(fresh)[1]] == ["", "0.012"]


def test_markdown_has_a_rule_below_its_head():
    assert to_markdown(["a", "b"], [["1", "2"], ["3", ""]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 |  |\n"


def test_a_bar_in_a_cell_does_not_end_the_cell():
    line = to_markdown(["a"], [["KL(data || samples)"]]).splitlines()[2]
    assert line.replace("\\|", "").count("|") == 2


def test_off_a_terminal_a_table_is_markdown(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    print_table(["a", "b"], [["1", "2"]], title="not shown")
    assert capsys.readouterr().out == to_markdown(["a", "b"], [["1", "2"]])


def test_on_a_terminal_a_table_is_drawn(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(["head"], [["cell"]], title="title")
    out = capsys.readouterr().out
    assert "title" in out
    assert "cell" in out
    assert "| --- |" not in out

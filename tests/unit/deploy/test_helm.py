"""The renderer that stands in for Helm: what it knows means what it means there, and anything else is an error."""

from __future__ import annotations

import pytest

from tests.support.helm import ChartError, RefusedError, render_text, values

SCOPE = {
    "Values": {
        "on": True,
        "off": False,
        "name": "x",
        "none": "",
        "table": {"b": [1, "two"], "a": {}},
        "text": "l1\nl2\n",
    },
    "Release": {"Name": "r"},
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a {{ .Values.name }} b", "a x b"),
        ("a {{- .Values.name -}} b", "axb"),
        ("a\n  {{- .Values.name }}\nb", "ax\nb"),
        ("{{ .Values.name | quote }}", '"x"'),
        ("{{ .Values.on }}", "true"),
        ('{{ .Values.none | default "d" }}', "d"),
        ("{{ .Values.none | default .Release.Name }}", "r"),
        ("{{ .Values.name | default .Release.Name }}", "x"),
        ("k:\n  {{- toYaml .Values.table | nindent 2 }}", "k:\n  a: {}\n  b:\n  - 1\n  - two"),
        ("k: |\n  {{- .Values.text | nindent 2 }}", "k: |\n  l1\n  l2\n  "),
        ("{{ if .Values.on }}1{{ else }}2{{ end }}", "1"),
        ("{{ if .Values.off }}1{{ else }}2{{ end }}", "2"),
        ("{{ if .Values.off }}1{{ if .Values.on }}2{{ else }}3{{ end }}{{ else }}4{{ end }}5", "45"),
        ("{{ if .Values.on }}1{{ if .Values.off }}2{{ else }}3{{ end }}{{ else }}4{{ end }}5", "135"),
        ('{{ if eq .Values.name "x" }}1{{ else }}2{{ end }}', "1"),
        ('{{ if eq .Values.name "y" }}1{{ else }}2{{ end }}', "2"),
        ("{{ if or .Values.none .Values.on }}1{{ else }}2{{ end }}", "1"),
        ("{{ if or .Values.none .Values.off }}1{{ else }}2{{ end }}", "2"),
        ('{{ if .Values.off }}{{ fail "no" }}{{ end }}1', "1"),
        ("a\n{{- if .Values.none }}\nno\n{{- end }}\nb", "a\nb"),
        ("a\n{{- if .Values.table }}\nyes\n{{- end }}\nb", "a\nyes\nb"),
    ],
)
def test_what_it_knows(template: str, text: str) -> None:
    assert render_text(template, SCOPE) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ range .Values.table }}{{ end }}",
        "{{ with .Values.table }}{{ end }}",
        '{{ include "name" . }}',
        "{{/* words */}}",
        "{{ .Values.missing }}",
        "{{ .Values.name | upper }}",
        "{{ .Values.table }}",
        "{{ $x := 1 }}",
        "{{ if .Values.on }}",
        "{{ if .Values.off }}{{ .Values.name | upper }}{{ end }}",
        "{{ if .Values.on }}1{{ else if .Values.off }}2{{ end }}",
        "{{ if and .Values.on .Values.on }}1{{ end }}",
        "{{ if eq .Values.on .Values.on .Values.on }}1{{ end }}",
        "{{ if not .Values.on }}1{{ end }}",
        "{{ if .Values.off }}{{ fail .Values.missing }}{{ end }}",
        "{{ end }}",
        "{{ .Values.name",
    ],
)
def test_anything_else_is_an_error(template: str) -> None:
    with pytest.raises(ChartError):
        render_text(template, SCOPE)


def test_a_refusal_is_one() -> None:
    with pytest.raises(RefusedError, match="not here"):
        render_text('{{ if .Values.on }}{{ fail "not here" }}{{ end }}', SCOPE)


def test_values_are_merged_table_by_table_and_taken_out_by_null() -> None:
    changed = values(image={"tag": "2"}, affinity={"nodeAffinity": None}, nodeSelector={})
    assert changed["image"]["tag"] == "2"
    assert changed["image"]["repository"] == values()["image"]["repository"]
    assert changed["affinity"] == {}
    assert changed["nodeSelector"] == values()["nodeSelector"] != {}

"""Completions for bash, zsh and fish, and man pages, from the table of verbs in `nri_gpu/cli/main.py`.

They lie below share/ as they do below /usr/share, where the package installs them.
"""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Final

from msgspec import Struct

from nri_gpu.cli.main import EXIT_HELP, GROUPS, VERBS, Verb
from tools import man_pages
from tools.files import ROOT, Files
from tools.man_pages import roff, see_also

SHARE: Final = ROOT / "share"
MADE_OF: Final = "the table of verbs"
MADE_BY: Final = f"Made by tools/share.py from {MADE_OF}: run `make generate`."
ABOUT: Final = "GPUs for containers through containerd's NRI"


class Takes(Enum):
    """The kind of an option's value, or of a positional argument."""

    NOTHING = auto()
    TEXT = auto()
    WORD = auto()  # one of `words`
    FILE = auto()
    FOLDER = auto()


class Argument(Struct, frozen=True):
    """An option with its spellings, or a positional argument, which has none. many: it may be given more than once."""

    flags: tuple[str, ...]
    help: str
    takes: Takes
    name: str
    words: tuple[str, ...]
    many: bool


def arguments_of(verb: Verb) -> list[Argument]:
    """Return options as `--help` has them, and --help itself; without those that are ignored."""
    shown = [(flags, told) for flags, told in verb.options if told["help"] != argparse.SUPPRESS]
    return [*(_argument(flags, told) for flags, told in shown), _argument(("-h", "--help"), HELP)]


NAMES: Final = [verb.name for verb in VERBS]
WORDS: Final = {"help": "show the verbs, or help VERB: the options of one", "version": "show the version"}
HELP: Final[Mapping[str, object]] = {"help": "show this help and exit", "action": "store_true"}


def _argument(flags: tuple[str, ...], told: Mapping[str, object]) -> Argument:
    is_option, action = flags[0].startswith("-"), told.get("action")
    if action is argparse.BooleanOptionalAction:
        flags = (*flags, *(f"--no-{flag.removeprefix('--')}" for flag in flags))
    words = told.get("choices")
    name = str(told.get("metavar", "" if words else flags[-1].lstrip("-").upper()))
    return Argument(
        flags if is_option else (),
        str(told["help"]),
        Takes.NOTHING if action and action != "append" else Takes.WORD if words else _takes(name),
        name or flags[-1].lstrip("-"),
        tuple(map(str, words)) if isinstance(words, tuple) else (),
        told.get("nargs") == "+" or action == "append",
    )


def _takes(metavar: str) -> Takes:
    if metavar == "DIR":
        return Takes.FOLDER
    return Takes.FILE if metavar in ("FILE", "PATH", "LOG") or "." in metavar else Takes.TEXT


# --- shells -----------------------------------------------------------------------------------------------------------


def bash() -> str:
    """Complete options of a verb, the words or files that an option takes, and files for the rest."""
    values, options = [], []
    for verb in VERBS:
        arguments = arguments_of(verb)
        for each in arguments:
            if each.flags and each.takes is not Takes.NOTHING:
                pattern = " | ".join(f'"{verb.name} {flag}"' for flag in each.flags)
                values.append(f"        {pattern}) {_bash_value(each)} ;;")
        flags = " ".join(flag for each in arguments for flag in each.flags)
        words = " ".join(word for each in arguments if not each.flags for word in each.words)
        files = any(not each.flags and each.takes is Takes.FILE for each in arguments)
        options.append(f'        {verb.name}) options="{flags}" words="{words}" files={"1" if files else ""} ;;')
    return f"""# bash completion for nri-gpu. {MADE_BY}
_nri_gpu() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} verb=${{COMP_WORDS[1]}}
    local options="" words="" files=""
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "{" ".join(NAMES)} help version --help --version" -- "$current")
        return
    fi
    if ((COMP_CWORD == 2)) && [[ $verb == help ]]; then
        mapfile -t COMPREPLY < <(compgen -W "{" ".join(NAMES)}" -- "$current")
        return
    fi
    # bash splits --option=value at the sign.
    if [[ $before == "=" ]]; then
        before=${{COMP_WORDS[COMP_CWORD - 2]}}
    elif [[ $current == "=" ]]; then
        current=""
    fi
    case "$verb $before" in
{chr(10).join(values)}
    esac
    case "$verb" in
{chr(10).join(options)}
    esac
    if [[ $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")
    elif [[ $words ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    elif [[ $files ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}}
complete -F _nri_gpu nri-gpu
"""


def _bash_value(argument: Argument) -> str:
    match argument.takes:
        case Takes.WORD:
            return f'mapfile -t COMPREPLY < <(compgen -W "{" ".join(argument.words)}" -- "$current"); return'
        case Takes.FILE | Takes.FOLDER:
            kind = "-f" if argument.takes is Takes.FILE else "-d"
            return f'compopt -o filenames; mapfile -t COMPREPLY < <(compgen {kind} -- "$current"); return'
        case _:
            return "return"


def zsh() -> str:
    told = [*((verb.name, verb.help) for verb in VERBS), *WORDS.items()]
    verbs = [f"    {shlex.quote(f'{name}:{_zsh(help)}')}" for name, help in told]
    cases = [line for verb in VERBS for line in _zsh_case(verb)]
    return f"""#compdef nri-gpu
# zsh completion for nri-gpu. {MADE_BY}
_nri_gpu() {{
  local -a verbs
  verbs=(
{chr(10).join(verbs)}
  )
  if (( CURRENT == 2 )); then
    _describe -t verbs verb verbs
    _arguments '--help[show this help and exit]' '--version[show the version and exit]'
    return
  fi
  shift words
  (( CURRENT-- ))
  case $words[1] in
    (help)
      _values verb {" ".join(NAMES)}
      ;;
{chr(10).join(cases)}
  esac
}}
_nri_gpu "$@"
"""


def _zsh_case(verb: Verb) -> Iterator[str]:
    yield f"    ({verb.name})"
    yield "      _arguments -S \\"
    specs = [_zsh_spec(each) for each in arguments_of(verb)]
    yield " \\\n".join(f"        {spec}" for spec in specs)
    yield "      ;;"


def _zsh_spec(argument: Argument) -> str:
    """Return a spec of `_arguments`: spellings, what it is in brackets, and what it takes."""
    value = {
        Takes.NOTHING: "",
        Takes.TEXT: f":{argument.name}: ",
        Takes.WORD: f":{argument.name}:({' '.join(argument.words)})",
        Takes.FILE: f":{_zsh(argument.name)}:_files",
        Takes.FOLDER: f":{argument.name}:_files -/",
    }[argument.takes]
    if not argument.flags:
        return shlex.quote(f"*{value}" if argument.many else value)
    told = f"[{_zsh(argument.help)}]{value}"
    equals = "=" if value else ""  # `--option=value` is one word, `--option value` two
    flags = [flag + equals if flag.startswith("--") else flag for flag in argument.flags]
    if len(flags) == 1:
        return shlex.quote("*" * argument.many + flags[0] + told)
    instead = shlex.quote(f"({' '.join(argument.flags)})")  # of which only one is offered
    return f"{instead}{{{','.join(flags)}}}{shlex.quote(told)}"


def _zsh(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in text)


def fish() -> str:
    lines = [f"# fish completion for nri-gpu. {MADE_BY}", "complete -c nri-gpu -f"]
    for name, told in (("help", "show this help and exit"), ("version", "show the version and exit")):
        lines.append(f"complete -c nri-gpu -n __fish_use_subcommand -l {name} -d {_fish(told)}")
    for name, told in (*((verb.name, verb.help) for verb in VERBS), *WORDS.items()):
        lines.append(f"complete -c nri-gpu -n __fish_use_subcommand -a {name} -d {_fish(told)}")
    lines.append(f"complete -c nri-gpu -n '__fish_seen_subcommand_from help' -a '{' '.join(NAMES)}'")
    for verb in VERBS:
        seen = f"complete -c nri-gpu -n '__fish_seen_subcommand_from {verb.name}'"
        lines += [f"{seen} {part}" for each in arguments_of(verb) if (part := _fish_part(each))]
    return "\n".join(lines) + "\n"


def _fish_part(argument: Argument) -> str:
    value = {
        Takes.NOTHING: "",
        Takes.TEXT: "-x",
        Takes.WORD: f"{'-x ' * bool(argument.flags)}-a {_fish(' '.join(argument.words))}",
        Takes.FILE: "-r -F" if argument.flags else "-F",
        Takes.FOLDER: "-x -a '(__fish_complete_directories)'",
    }[argument.takes]
    if not argument.flags:
        return value
    spelled = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in argument.flags)
    return " ".join(filter(None, (spelled, value, f"-d {_fish(argument.help)}")))


def _fish(text: str) -> str:
    """Quote for fish, which knows two escapes within single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


# --- man pages --------------------------------------------------------------------------------------------------------


def manual(verb: Verb | None = None) -> str:
    """Return a page in man(7): of one verb, or of the program."""
    name = f"nri-gpu-{verb.name}" if verb else "nri-gpu"
    lines = man_pages.head(name, 1, verb.help if verb else ABOUT, MADE_OF)
    lines += _of_verb(verb) if verb else _of_program()
    others = ["nri-gpu(1)"] if verb else [f"nri-gpu-{each.name}(1)" for each in VERBS]
    lines += [".SH EXIT STATUS", *_exits(), *see_also("nri-gpu-request(7)", "nri-gpu-policy(5)", *others)]
    return "\n".join(lines) + "\n"


def _of_program() -> Iterator[str]:
    yield from (".SH SYNOPSIS", ".B nri\\-gpu", ".I VERB", "[options]", ".SH VERBS")
    helps = {verb.name: verb.help for verb in VERBS}
    for group, names in {**GROUPS, "help": tuple(WORDS)}.items():
        yield f".SS {group}"
        for name in names:
            yield from (".TP", f".B {roff(name)}", roff({**helps, **WORDS}[name]))


def _of_verb(verb: Verb) -> Iterator[str]:
    arguments = arguments_of(verb)
    yield from (".SH SYNOPSIS", f".B nri\\-gpu {roff(verb.name)}", "[options]")
    for each in arguments:
        if not each.flags:
            yield f".I {roff('|'.join(each.words) or each.name)}{' ...' if each.many else ''}"
    yield ".SH DESCRIPTION"
    for line in verb.teach.splitlines():
        example = line.startswith("  ")
        yield from (".IP", ".EX", roff(line.strip()), ".EE") if example else (roff(line),)
    yield ".SH OPTIONS"
    for each in arguments:
        value = "{" + ",".join(each.words) + "}" if each.words else "" if each.takes is Takes.NOTHING else each.name
        head = ", ".join(f"\\fB{roff(flag)}\\fR" for flag in each.flags)
        yield from (".TP", " ".join(filter(None, (head, f"\\fI{roff(value)}\\fR" if value else ""))), roff(each.help))


def _exits() -> Iterator[str]:
    """Yield EXIT_HELP as a list: it has a title and then codes with their meanings, three blanks between them."""
    for each in EXIT_HELP.splitlines()[1].split("   "):
        code, _, meaning = each.strip().partition(" ")
        yield from (".TP", f".B {code}", roff(meaning))


# --- the files --------------------------------------------------------------------------------------------------------


def completions_and_manuals() -> Files:
    """Return each below its place, and None for each that is there of a verb that is gone."""
    pages = {f"man/man1/nri-gpu-{verb.name}.1": manual(verb) for verb in VERBS}
    made = {
        "bash-completion/completions/nri-gpu": bash(),
        "zsh/site-functions/_nri-gpu": zsh(),
        "fish/vendor_completions.d/nri-gpu.fish": fish(),
        "man/man1/nri-gpu.1": manual(),
        "man/man5/nri-gpu-policy.5": man_pages.policy(),
        "man/man7/nri-gpu-request.7": man_pages.request(),
        **pages,
    }
    folders = {name.partition("/")[0] for name in made}
    there = [path for folder in folders for path in (SHARE / folder).rglob("*") if path.is_file()]
    return {**dict.fromkeys(there), **{SHARE / name: text for name, text in made.items()}}

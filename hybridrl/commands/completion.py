"""`hybridrl completion SHELL`: print a script that completes subcommands, options, runs and
settings.

The words are in the script, so that a key press starts no Python. zsh runs the one of bash.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from hybridrl.commands.output import fill_template
from hybridrl.errors import ConfigError

_SHELLS = ("bash", "zsh", "fish")
_SETTINGS_COMMAND = "plan"
"""The subcommand that takes settings of a job."""
_BASH_TEMPLATE = """\
# Add to ~/.bashrc: source <(hybridrl completion bash)
_hybridrl_settings="@SETTINGS@"
_hybridrl_presets="@PRESETS@"

_hybridrl_complete() {
    # $1: words to choose from; settings get no space behind them, runs are folders.
    local current=${COMP_WORDS[COMP_CWORD]} name
    # bash takes the sign for a word of its own, zsh does not.
    if [[ $current == "=" ]]; then
        name=${COMP_WORDS[COMP_CWORD-1]} current=""
    elif ((COMP_CWORD > 1)) && [[ ${COMP_WORDS[COMP_CWORD-1]} == "=" ]]; then
        name=${COMP_WORDS[COMP_CWORD-2]}
    fi
    case "$name" in
@VALUES@
    esac
    [[ $current == *=* ]] && set -- "$_hybridrl_presets"
    COMPREPLY=($(compgen -W "$1" -- "$current"))
    if [[ $current != -* ]]; then
        local IFS=$'\\n'  # of names with spaces
        COMPREPLY+=($(compgen -d -- "$current"))
        [[ -z $current && -d runs ]] && COMPREPLY+=($(compgen -d -- runs/))
    fi
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}

_hybridrl() {
    local path="" word number
    for ((number = 1; number < COMP_CWORD; number++)); do
        word=${COMP_WORDS[number]}
        case "$path/$word" in
            @PATHS@) path=$path/$word ;;
        esac
    done
    case "$path" in
@WORDS@
    esac
}

_hybridrl_main() {
    # Any other program of Python's is completed as it was before.
    if [[ " ${COMP_WORDS[*]} " == *" -m hybridrl.main "* ]]; then
        _hybridrl_complete "@MAIN@ $_hybridrl_settings"
    elif [[ -n $_hybridrl_before ]]; then
        $_hybridrl_before "$@"
    fi
}

complete -o default -F _hybridrl hybridrl
"""
_BASH_PYTHON_TEMPLATE = """\
# bash-completion loads what completes Python only when it is wanted.
{ complete -p python || _comp_load python || _completion_loader python; } &>/dev/null
[[ $(complete -p python 2>/dev/null) =~ -F\\ ([^ ]+) && ${BASH_REMATCH[1]} != _hybridrl_main ]] &&
    _hybridrl_before=${BASH_REMATCH[1]}
complete -o default -F _hybridrl_main python python3
"""
_ZSH_HEADER = (
    "# Add to ~/.zshrc: source <(hybridrl completion zsh)\nautoload -Uz compinit bashcompinit\n"
)
_ZSH_HEADER += "(( $+functions[compdef] )) || compinit\nbashcompinit\n"
_ZSH_PYTHON_TEMPLATE = """\
_hybridrl_python() {
    if [[ " $words " == *" -m hybridrl.main "* ]]; then
        _bash_complete -o default -F _hybridrl_main
    else
        $_hybridrl_zsh_before
    fi
}
[[ $_comps[python] == _hybridrl_python ]] || _hybridrl_zsh_before=${_comps[python]:-_python}
compdef _hybridrl_python python python3
"""
_FISH_HEADER = (
    "# Write to a file: hybridrl completion fish > ~/.config/fish/completions/hybridrl.fish"
)
_MAIN_OPTIONS = "--help --version --cfg --multirun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a script for a shell. bash: add `source <(hybridrl completion bash)` to ~/.bashrc."
    )
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")


def run(chosen: argparse.Namespace) -> int:
    """Print the completion script of a shell.

    Raises:
        ConfigError: for another shell.
    """
    from hybridrl.cli import COMMANDS, build_parser

    if chosen.shell not in _SHELLS:
        raise ConfigError(f"{chosen.shell}: must be bash, zsh or fish.")
    parser = build_parser([*COMMANDS])
    if chosen.shell == "fish":
        script = _render_fish_script(parser)
    elif chosen.shell == "zsh":
        script = _ZSH_HEADER + _render_bash_script(parser) + _ZSH_PYTHON_TEMPLATE
    else:
        script = _render_bash_script(parser) + _BASH_PYTHON_TEMPLATE
    sys.stdout.write(script)
    return 0


def _list_completions(
    parser: argparse.ArgumentParser, path: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """Yield the subcommands and options at each command path: `""`, `/checkpoint`,
    `/checkpoint/list`.

    Options of which one spelling is long are there with that alone.
    """
    found: list[str] = []
    inner: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = action.choices
        found += [option for option in action.option_strings if option.startswith("--")]
    yield path, [*inner, *found]
    for name, one in inner.items():
        yield from _list_completions(one, f"{path}/{name}")


def list_setting_completions() -> list[str]:
    """List all settings and presets with their `=`."""
    from hybridrl.composition.setting_names import list_settings
    from hybridrl.config.presets import DEFAULT_PRESETS

    return sorted({f"{name}=" for name in (*list_settings(), *DEFAULT_PRESETS, "recipe")})


def preset_values() -> dict[str, tuple[str, ...]]:
    """Return the names of the presets of each group, such as `algorithm`."""
    from hybridrl.config.presets import DEFAULT_PRESETS, list_presets

    return {group: list_presets(group) for group in DEFAULT_PRESETS}


def preset_words() -> list[str]:
    """Return the presets as whole words: `algorithm=grpo`."""
    return [f"{group}={name}" for group, names in preset_values().items() for name in names]


def _render_bash_script(parser: argparse.ArgumentParser) -> str:
    """Render the script for bash, which zsh runs with its own prologue; without the completion of
    `python`."""
    known = dict(_list_completions(parser))
    cases = []
    for path, those in known.items():
        more = " $_hybridrl_settings" if path == f"/{_SETTINGS_COMMAND}" else ""
        cases.append(f'        "{path}") _hybridrl_complete "{" ".join(those)}{more}" ;;')
    presets = preset_values()
    values = [
        f'        {group}) COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$current")); return 0 ;;'
        for group, names in presets.items()
    ]
    words = {
        "PRESETS": " ".join(preset_words()),
        "VALUES": "\n".join(values),
        "SETTINGS": " ".join(list_setting_completions()),
        "PATHS": " | ".join(f'"{path}"' for path in known if path),
        "WORDS": "\n".join(cases),
        "MAIN": _MAIN_OPTIONS,
    }
    return fill_template(_BASH_TEMPLATE, words)


def _render_fish_script(parser: argparse.ArgumentParser) -> str:
    """Render the script for fish."""
    lines = [
        _FISH_HEADER,
        f"set -g _hybridrl_settings {' '.join([*list_setting_completions(), *preset_words()])}",
    ]
    known = dict(_list_completions(parser))
    for path, those in known.items():
        names = path.split("/")[1:]
        deeper = [one.rpartition("/")[2] for one in known if one.rpartition("/")[0] == path and one]
        seen = [f"__fish_seen_subcommand_from {name}" for name in names]
        unseen = [f"not __fish_seen_subcommand_from {' '.join(deeper)}"] if deeper else []
        when = "; and ".join([*seen, *unseen])
        for word in those:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c hybridrl -n '{when}' {kind}")
    lines.append(
        f"complete -c hybridrl -n '__fish_seen_subcommand_from {_SETTINGS_COMMAND}' -a "
        "'$_hybridrl_settings'"
    )
    return "\n".join(lines) + "\n"

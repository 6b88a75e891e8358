"""The scripts that bash, zsh and fish load."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from pulsenetd.completion.words import Command, Value, Word

RUNS: Final = 'ls "${XDG_DATA_HOME:-$HOME/.local/share}/pulsenet" 2>/dev/null'
"""Runs of this machine, as ``pulsenet.local.directories`` places them."""


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# bash

_BASH: Final = """\
# Completion of pulsenet for bash: source this file, or put it into /etc/bash_completion.d.
_pulsenet() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} at= word
    # bash splits --option=value into three words.
    if [[ $cur == "=" ]]; then cur=
    elif [[ $prev == "=" ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$at $word" in
            @COMMANDS@) at="$at $word" ;;
        esac
    done
    COMPREPLY=()
    case "$at $prev" in
@VALUES@
    esac
    case "$at" in
@WORDS@
    esac
    if [[ $cur != -* ]]; then
        case "$at" in
@PLACES@
        esac
    fi
}
complete -F _pulsenet pulsenet
"""


def write_bash(commands: Sequence[Command]) -> str:
    """Return the script for bash."""
    values, words, places = [], [], []
    for command in commands:
        at = command.at
        for option in command.options:
            if option.value is not Value.NONE:
                pattern = "|".join(_quote(f"{at} {name}") for name in option.names)
                values.append(f"        {pattern}) {_bash_value(option)}; return ;;")
        listed = [name for option in command.options for name in option.names] + [name for name, _ in command.actions]
        words.append(f'        {_quote(at)}) COMPREPLY=($(compgen -W {_quote(" ".join(listed))} -- "$cur")) ;;')
        if command.place is not None:
            places.append(f"            {_quote(at)}) {_bash_value(command.place)} ;;")
    names = "|".join(_quote(command.at) for command in commands if command.path)
    return (
        _BASH.replace("@COMMANDS@", names)
        .replace("@VALUES@", "\n".join(values))
        .replace("@WORDS@", "\n".join(words))
        .replace("@PLACES@", "\n".join(places))
    )


def _bash_value(word: Word) -> str:
    match word.value:
        case Value.FILE:
            return 'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur")'
        case Value.DIRECTORY:
            return 'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur")'
        case Value.RUN:
            return f'COMPREPLY=($(compgen -W "$({RUNS})" -- "$cur"))'
        case Value.CHOICE:
            return f'COMPREPLY=($(compgen -W {_quote(" ".join(word.choices))} -- "$cur"))'
        case _:
            return ":"


# zsh

_ZSH: Final = """\
#compdef pulsenet
# Completion of pulsenet for zsh: save as _pulsenet in a directory of $fpath, or source it after compinit.
_pulsenet_runs() {
    local -a runs
    runs=(${(f)"$(@RUNS@)"})
    compadd -a runs
}
@FUNCTIONS@
if [[ ${funcstack[1]} == _pulsenet ]]; then
    _pulsenet "$@"
else
    compdef _pulsenet pulsenet
fi
"""


def write_zsh(commands: Sequence[Command]) -> str:
    """Return the script for zsh."""
    return _ZSH.replace("@RUNS@", RUNS).replace("@FUNCTIONS@", "\n".join(map(_zsh_function, commands)))


def _zsh_function(command: Command) -> str:
    name = "_".join(("_pulsenet", *command.path))
    arguments = [_zsh_option(option, spelling) for option in command.options for spelling in option.names]
    if not command.actions:
        places = [
            f"{number}:{_zsh_text(place.label)}:{_zsh_value(place)}" for number, place in enumerate(command.places, 1)
        ]
        lines = " \\\n        ".join(map(_quote, [*arguments, *places]))
        return f"{name}() {{\n    _arguments -S \\\n        {lines}\n}}"
    listed = "\n".join(f"        {_quote(action + ':' + _zsh_text(text))}" for action, text in command.actions)
    lines = " \\\n        ".join(map(_quote, [*arguments, "1: :->command", "*:: :->rest"]))
    return (
        f"{name}() {{\n    local curcontext=$curcontext state line\n    local -a commands\n"
        f"    commands=(\n{listed}\n    )\n"
        f"    _arguments -C \\\n        {lines} && return\n    case $state in\n"
        f"        command) _describe -t commands command commands ;;\n"
        f"        rest) (( $+functions[{name}_$line[1]] )) && {name}_$line[1] ;;\n    esac\n}}"
    )


def _zsh_option(option: Word, spelling: str) -> str:
    value = "" if option.value is Value.NONE else f":{_zsh_text(option.label)}:{_zsh_value(option)}"
    return f"*{spelling}[{_zsh_text(option.help)}]{value}"


def _zsh_value(word: Word) -> str:
    match word.value:
        case Value.FILE:
            return "_files"
        case Value.DIRECTORY:
            return "_files -/"
        case Value.RUN:
            return "_pulsenet_runs"
        case Value.CHOICE:
            return f"({' '.join(word.choices)})"
        case _:
            return " "


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


# fish

_FISH: Final = """\
# Completion of pulsenet for fish: save as ~/.config/fish/completions/pulsenet.fish.
function __pulsenet_at
    set -l at
    for word in (commandline -opc)[2..-1]
        switch "$at $word"
            case @COMMANDS@
                set at "$at $word"
        end
    end
    test "$at" = "$argv[1]"
end
complete -c pulsenet -f
@LINES@
"""


def write_fish(commands: Sequence[Command]) -> str:
    """Return the script for fish."""
    lines = []
    for command in commands:
        start = f"complete -c pulsenet -n {_fish_quote(f'__pulsenet_at {_fish_quote(command.at)}')}"
        lines += [f"{start} -a {_fish_quote(name)} -d {_fish_quote(text)}" for name, text in command.actions]
        for option in command.options:
            spelled = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            lines.append(f"{start} {spelled} -d {_fish_quote(option.help)}{_fish_value(option)}")
        if command.place is not None:
            lines.append(start + _fish_value(command.place).replace(" -x", "").replace(" -r", ""))
    names = " ".join(_fish_quote(command.at) for command in commands if command.path)
    return _FISH.replace("@COMMANDS@", names).replace("@LINES@", "\n".join(lines))


def _fish_value(word: Word) -> str:
    match word.value:
        case Value.NONE:
            return ""
        case Value.FILE:
            return " -r -F"
        case Value.DIRECTORY:
            return " -x -a '(__fish_complete_directories)'"
        case Value.RUN:
            runs = "ls (set -q XDG_DATA_HOME; and echo $XDG_DATA_HOME; or echo ~/.local/share)/pulsenet 2>/dev/null"
            return f" -x -a '({runs})'"
        case Value.CHOICE:
            return f" -x -a {_fish_quote(' '.join(word.choices))}"
        case _:
            return " -x"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


WRITERS: Final[dict[str, Callable[[Sequence[Command]], str]]] = {
    "bash": write_bash,
    "zsh": write_zsh,
    "fish": write_fish,
}

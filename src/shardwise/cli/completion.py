"""`shardwise --completion bash|zsh|fish`: a script that makes the shell complete verbs, options, files and the recipe's own arguments."""

import ast
from pathlib import Path

from shardwise.errors import ConfigError

ANYWHERE = ("--cpu-devices", "--json")
OF_TRAIN = (
    "--accept",
    "--force-unlock",
    "--track",
    "--profile",
    "--no-plan",
    "--watchdog",
    "--coordinator",
    "--num-processes",
    "--process-id",
    "--bind",
)
VERBS: dict[str, tuple[str, ...]] = {  # tests hold these against the help of every command
    "train": (*ANYWHERE, *OF_TRAIN),
    "explain": (*ANYWHERE, "--plot"),
    "plan": (
        *ANYWHERE,
        "--on",
        "--search",
        "--compile-at-most",
        "--largest-batch",
        "--tokens",
        "--html",
        "--no-cache",
    ),
    "verify": (*ANYWHERE, "--meshes", "--verify-steps", "--real-devices"),
    "sweep": (*ANYWHERE, *OF_TRAIN[:6], "--out", "--retry", "--by", "--largest", "--dry-run"),
    "launch": (
        *(
            "--processes",
            "--restarts",
            "--write",
            "--to",
            "--nodes",
            "--gpus",
            "--cpus",
            "--memory",
            "--hours",
            "--name",
        ),
        *("--image", "--volume"),
    ),
    "data": (
        "--json",
        "--out",
        "--tokenizer",
        "--field",
        "--end-token",
        "--step",
        "--rows",
        "--dtype",
    ),
    "checkpoint": (
        "--json",
        "--verify",
        "--values",
        "--out",
        "--format",
        "--average",
        "--base",
        "--trained-only",
        "--vocab-size",
        "--step",
    ),
    "report": ("--json", "--out", "--watch", "--port", "--every"),
    "sample": (
        *(
            "--json",
            "--prompt",
            "--tokens",
            "--temperature",
            "--top-k",
            "--top-p",
            "--seed",
            "--num",
            "--step",
            "--average",
        ),
        *("--tokenizer", "--mesh", "--dtype", "--no-cache", "--recipe"),
    ),
    "doctor": (*ANYWHERE, "--timeout", "--no-devices"),
}
SECOND = {"data": ("prepare", "show"), "checkpoint": ("ls", "show", "diff", "verify", "export")}
WITH_RECIPE = ("train", "explain", "plan", "verify", "sweep")
SHELLS = ("bash", "zsh", "fish")

BASH = """\
# shardwise: eval "$(shardwise --completion bash)" in ~/.bashrc
_shardwise() {
    local word="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}" words
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@VERBS@ --help --version --completion" -- "$word"))
        return
    fi
    case "$verb" in
@CASES@
    --completion) words="@SHELLS@" ;;
    *) words="" ;;
    esac
    if [ "$COMP_CWORD" -eq 2 ] && [ "${word:0:1}" != "-" ]; then
        case "$verb" in
@SECOND@
        --completion) COMPREPLY=($(compgen -W "$words" -- "$word")); return ;;
        esac
    fi
    case "$verb:$word" in
    @RECIPES@)
        [ -f "${COMP_WORDS[2]%%:*}" ] && words="$words $(shardwise --completion arguments "${COMP_WORDS[2]}" 2>/dev/null)" ;;
    esac
    case "$word" in
    -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
    *) compopt -o filenames 2>/dev/null || true; COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}
complete -F _shardwise shardwise
"""
ZSH = """\
# shardwise: eval "$(shardwise --completion zsh)" in ~/.zshrc, after compinit
_shardwise() {
    local -a found
    if (( CURRENT == 2 )); then
        compadd -- @VERBS@ --help --version --completion
        return
    fi
    case "$words[2]" in
@CASES@
    --completion) compadd -- @SHELLS@; return ;;
    esac
    if (( CURRENT == 3 )); then
        case "$words[2]" in
@SECOND@
        esac
    fi
    case "$words[2]" in
    @RECIPES@) [[ -f "${words[3]%%:*}" ]] && found+=(${(z)"$(shardwise --completion arguments "$words[3]" 2>/dev/null)"}) ;;
    esac
    if [[ "$words[CURRENT]" == -* ]]; then compadd -- $found; else _files; fi
}
compdef _shardwise shardwise
"""
FISH = """\
# shardwise: shardwise --completion fish > ~/.config/fish/completions/shardwise.fish
function __shardwise_arguments
    set -l words (commandline -opc)
    test (count $words) -ge 3; and shardwise --completion arguments $words[3] 2>/dev/null | string split ' '
end
complete -c shardwise -n __fish_use_subcommand -f -a '@VERBS@ --help --version --completion'
"""


def completion(shell: str, target: str = "") -> str:
    """The script for a shell; or for "arguments", those of a recipe, which is read and not run."""
    if shell == "arguments":
        return " ".join(recipe_arguments(target)) + "\n"
    if shell not in SHELLS:
        raise ConfigError(f"--completion '{shell}': there are {', '.join(SHELLS)}.")
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def recipe_arguments(target: str) -> list[str]:
    """The keyword arguments of the function in the file, as options. A file that is no recipe has none."""
    file, _, function = target.partition(":")
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == (function or "recipe"):
            names = [
                arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            return [f"--{name.replace('_', '-')}" for name in names]
    return []


def _filled(script: str, cases: str, second: str) -> str:
    script = (
        script.replace("@VERBS@", " ".join(VERBS))
        .replace("@SHELLS@", " ".join(SHELLS))
        .replace("@CASES@", cases)
    )
    return script.replace("@SECOND@", second)


def _bash() -> str:
    cases = "\n".join(
        f'    {verb}) words="{" ".join(options)} --help" ;;' for verb, options in VERBS.items()
    )
    second = "\n".join(
        f'        {verb}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")); return ;;'
        for verb, words in SECOND.items()
    )
    return _filled(BASH, cases, second).replace(
        "@RECIPES@", " | ".join(f"{verb}:-*" for verb in WITH_RECIPE)
    )


def _zsh() -> str:
    cases = "\n".join(
        f"    {verb}) found=({' '.join(options)} --help) ;;" for verb, options in VERBS.items()
    )
    second = "\n".join(
        f"        {verb}) compadd -- {' '.join(words)}; return ;;" for verb, words in SECOND.items()
    )
    return _filled(ZSH, cases, second).replace("@RECIPES@", "|".join(WITH_RECIPE))


def _fish() -> str:
    lines = [_filled(FISH, "", "").rstrip("\n")]
    for verb, options in VERBS.items():
        seen = f"complete -c shardwise -n '__fish_seen_subcommand_from {verb}'"
        lines += [f"{seen} -l {option.removeprefix('--')}" for option in (*options, "--help")]
    lines += [
        f"complete -c shardwise -n '__fish_seen_subcommand_from {verb}' -a '{' '.join(words)}'"
        for verb, words in SECOND.items()
    ]
    lines.append(
        f"complete -c shardwise -n '__fish_seen_subcommand_from {' '.join(WITH_RECIPE)}' -a '(__shardwise_arguments)'"
    )
    return "\n".join(lines) + "\n"

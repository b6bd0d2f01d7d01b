r"""The part of the batch script that decides what becomes of the job: done, again, or given up.

- Ranks that were told to make room, saved and ended with 0: back into the queue, not counted.
- What the user must mend (code 2): never again.
- All else is a failed start, whoever was told what: a save that fails at a stop, a stop that takes
  too long, a setup command on a bad node. It is tried again while the newest complete checkpoint is
  further than the time before, else so many times; steps that were not saved do not count.
"""

from launch.slurm.options import SlurmOptions

REQUEUE_TRIES = 6

_TAKES_BACK = [
    '  say "$1: back into the queue"',
    "  # The controller may be away for a moment. And where a node's daemon died, this script",
    "  # may have outlived its job's next start.",
    f"  for try in {{1..{REQUEUE_TRIES}}}; do",
    '    case "$(scontrol -o show job "$SLURM_JOB_ID")" in',
    '      *" Restarts=${SLURM_RESTART_COUNT:-0} "*)',
    '        if scontrol requeue "$SLURM_JOB_ID"; then exit 0; fi ;;',
    '      *" Restarts="*) say "a later start goes on already"; exit 1 ;;',
    "    esac",
    "    sleep 20",
    "  done",
    '  say "the requeue was refused"',
    "  exit 1",
]


def ways_out(options: SlurmOptions) -> list[str]:
    """Return the functions that end a start; they come before everything that can fail."""
    again = _TAKES_BACK
    if not options.requeue:
        again = ['  say "$1: not requeued (--no-requeue)"', "  exit 1"]
    most = options.max_restarts
    saved = r"""s/.*"checkpoint": "[^"]*step_0*\([0-9][0-9]*\)".*/\1/p"""
    return [
        "again() {  # why",
        *again,
        "}",
        "",
        "# Tried again while the newest complete checkpoint is further than the time before, else",
        "# so many times.",
        "failed() {  # why, exit code",
        '  if [ "$told" = TERM ]; then say "ended by request, before the last step"; exit 143; fi',
        '  local notes="$kimi_run_dir/logs/failures-$SLURM_JOB_ID" failures furthest saved why',
        '  read -r failures furthest < <(cat "$notes" 2>/dev/null) || true',
        r'  [[ "$failures $furthest" =~ ^[1-9][0-9]*\ [0-9]+$ ]] || failures=0 furthest=-1',
        f"  saved=$(sed -n '{saved}' \\",
        '    "$kimi_run_dir/status.json" 2>/dev/null) || true',
        '  if [ "${saved:-0}" -gt "$furthest" ]; then failures=0 furthest=${saved:-0}; fi',
        "  failures=$((failures + 1))",
        "  # Where nothing can be written, SLURM's own count of starts has to do.",
        '  { echo "$failures $furthest" >"$notes.partial" && mv -f "$notes.partial" "$notes"; } ||',
        "    failures=$((${SLURM_RESTART_COUNT:-0} + 1))",
        '  why="$1; newest checkpoint: ${saved:+step }${saved:-none}"',
        f'  if [ "$failures" -gt {most} ]; then',
        f'    say "$why; {most} restarts got no further"',
        '    exit "$2"',
        "  fi",
        f'  again "$why; restart $failures of {most}"',
        "}",
        "",
        "# With `set -e` this script ends at the first command that fails, as on a bad node.",
        "ended() {",
        "  local code=$?",
        '  if [ -z "$doing" ]; then return; fi',
        "  # Not 0, even if a line of the setup says so: nothing was trained.",
        '  failed "failed before the ranks ran (exit code $code): $doing" "$((code ? code : 1))"',
        "}",
        "trap ended EXIT",
        "",
    ]


def ending(options: SlurmOptions) -> list[str]:
    """Return the lines that look at what the ranks did, and choose."""
    late = f"the ranks did not stop within {options.stop_seconds} s (--save-seconds)"
    return [
        "doing=",
        'stands() { grep -qs "$1" "$kimi_run_dir/status.json"; }',
        'if [ "$code" -eq 0 ] && stands \'"state": "finished"\'; then say "finished"; exit 0; fi',
        'no_use() { grep -qsx "exit code 2" "$kimi_run_dir"/logs/error_rank_*.txt; }',
        'if [ "$code" -eq 2 ] || no_use; then',
        '  say "stopped by something that a restart does not mend: see above"',
        "  exit 2",
        "fi",
        "# The ranks may have been told without this script.",
        'if [ "$code" -eq 0 ] && stands SIGUSR1; then told=${told:-USR1}; fi',
        'if [ "$code" -eq 0 ] && stands SIGTERM; then told=${told:-TERM}; fi',
        "# In order, or before there were any ranks. Not counted: it may happen every day.",
        'if [ "$told" = USR1 ] && { [ "$code" -eq 0 ] || [ -z "$step" ]; }; then',
        '  again "told to make room"',
        "fi",
        'why="failed (exit code $code)"',
        f'if [ -n "$late" ]; then why="{late}"; fi',
        "# Not 0: what waits for this job must not start on half a training.",
        'if [ "$code" -eq 0 ]; then why="the ranks stopped in order" code=1; fi',
        'failed "$why" "$code"',
    ]

"""The command line: verbs only. Everything heavy is imported by the verb that needs it."""

import argparse
import ipaddress
import os
import socket
import sys
from pathlib import Path

from evolving_infra import __version__, env
from evolving_infra.config import ClusterConfig, parse_split
from evolving_infra.errors import EvolvingInfraError, InputError, wrong

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEMO_TRACES = [EXAMPLES / "trace_0279.jsonl", EXAMPLES / "trace_0291.jsonl"] * 2
"""Four agents: two sessions with sub-agents, one of them with a compaction, each twice."""
COUNT_FLAGS = ("nodes", "page_size", "tp", "max_context", "l1_blocks", "l2_blocks")


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Exit code 0 if all went well, 1 with one sentence if not, 2 for wrong usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.verb(options)
    except EvolvingInfraError as error:
        print(f"evolving-infra: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on
        return 141
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evolving-infra", description="Serving infrastructure for LLM agents."
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    serve = verbs.add_parser("serve", help="run a cluster on this machine until Ctrl-C")
    _cluster_flags(serve, port=8000)
    serve.add_argument("--run-dir", type=Path, help="keep sockets, logs and the journal here")
    serve.set_defaults(verb=_serve)

    replay = verbs.add_parser("replay", help="replay agent traces and print a report")
    replay.add_argument("traces", nargs="+", type=Path, metavar="FILE")
    _cluster_flags(replay, port=0)
    _replay_flags(replay)
    replay.set_defaults(verb=_replay)

    demo = verbs.add_parser("demo", help="replay the example traces with two role changes")
    _cluster_flags(demo, port=0)
    _replay_flags(demo)
    demo.set_defaults(
        verb=_demo,
        traces=DEMO_TRACES,
        time_scale="1/100",
        max_wait=2.0,
        role_change=["node1:prefill@10s", "node1:decode@35s"],
    )

    role = verbs.add_parser("role", help="change the role of a node of a running cluster")
    role.add_argument("node")
    role.add_argument("role", choices=("prefill", "decode", "both"))
    role.add_argument("--url", default=env.url(), help="gateway (default: %(default)s)")
    role.set_defaults(verb=_role)

    trace = verbs.add_parser("trace", help="look at trace files")
    kinds = trace.add_subparsers(required=True, metavar="WHAT")
    stats = kinds.add_parser("stats", help="count what is in a trace")
    stats.add_argument("traces", nargs="+", type=Path, metavar="FILE")
    stats.set_defaults(verb=_trace_stats)
    convert = kinds.add_parser("convert", help="write a trace as Dynamo agentic_mooncake v2")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.set_defaults(verb=_trace_convert)
    return parser


def _cluster_flags(parser: argparse.ArgumentParser, port: int) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument("--nodes", type=int, help="number of nodes; checked against --split")
    group.add_argument(
        "--split", help="roles in node order, such as 1P2D (default: 1P and the rest D)"
    )
    group.add_argument("--model", default="tiny-mla-moe", help="tiny-mla-moe or tiny-gqa")
    group.add_argument("--page-size", type=int, default=16, help="tokens per block: 16, 32 or 64")
    group.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    group.add_argument("--tp", type=int, default=2, help="ranks per node (default: %(default)s)")
    group.add_argument(
        "--max-context", type=int, help="tokens of prompt and output (default: 8192)"
    )
    group.add_argument("--l1-blocks", type=int, help="device pages per rank (default: 4096)")
    group.add_argument("--l2-blocks", type=int, default=16384, help="host blocks per node")
    group.add_argument("--eviction", default="counted", help="counted (by active branches) or lru")
    group.add_argument(
        "--verify", default="pool", help="pool: check host blocks; device: re-read the pages too"
    )
    group.add_argument("--no-prefetch", action="store_true", help="fetch only when a request comes")
    group.add_argument("--journal", action="store_true", help="keep the controller's journal")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; there is no authentication"
    )
    group.add_argument("--port", type=int, default=port, help="port of the gateway; 0 picks one")


def _replay_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replay")
    group.add_argument(
        "--url",
        help="replay against this running gateway instead of a new cluster; each such replay "
        "makes up new tokens, so that none reuses what an earlier one left",
    )
    group.add_argument("--token-scale", default="1/32", help="tokens per recorded token")
    group.add_argument("--time-scale", default="1/20", help="seconds per recorded second")
    group.add_argument(
        "--max-wait", type=float, help="cut recorded waits to this many seconds, scaled"
    )
    group.add_argument("--concurrency", type=int, help="agents (traces) at once (default: all)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--seed", type=int, default=0, help="of sampling and of what is checked")
    group.add_argument(
        "--check-exact", type=int, default=20, metavar="N", help="requests to recompute"
    )
    group.add_argument(
        "--role-change", action="append", metavar="NODE:ROLE@SECONDSs", help="may be repeated"
    )
    group.add_argument("--json", type=Path, help="write the report here")
    group.add_argument("--run-dir", type=Path, help="keep sockets, logs and the journal here")


def _cluster_config(options: argparse.Namespace, fit_tokens: int = 0) -> ClusterConfig:
    """The cluster the flags describe; unless a flag says less, a context holds ``fit_tokens``.

    Warns on stderr if others than this machine can reach it.
    """
    from evolving_infra.config import MODELS, ControlConfig, EngineConfig, StoreConfig

    for name in COUNT_FLAGS:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise wrong(f"--{name.replace('_', '-')}", "a positive number", value)
    context = options.max_context if options.max_context is not None else max(8192, fit_tokens)
    context = -(-context // options.page_size) * options.page_size
    model = MODELS.get(options.model)
    share = model.top_k / model.experts if model is not None and model.experts else 0.0
    pages = options.l1_blocks
    if pages is None:
        pages = max(4096, 4 * context // options.page_size)
    config = ClusterConfig(
        split=_split(options.nodes, options.split),
        host=options.host,
        port=free_port(options.host, options.port),
        journal=options.journal,
        engine=EngineConfig(
            model=options.model,
            page_size=options.page_size,
            tp_size=options.tp,
            device=options.device,
            device_pages=pages,
            max_context_tokens=context,
            verify=options.verify,
        ),
        store=StoreConfig(blocks=options.l2_blocks, eviction=options.eviction),
        control=ControlConfig(prefetch=not options.no_prefetch, expert_share=share),
    )
    if not _is_loopback(options.host):
        print(
            f"warning: {options.host} can be reached from other machines and there is no "
            "authentication: whoever reaches the gateway can use it",
            file=sys.stderr,
        )
    return config


def _split(nodes: int | None, split: str | None) -> str:
    """``--split``, or one third of ``--nodes`` for prefill (3 nodes: 1P2D; one node does both)."""
    if split is None:
        count = 3 if nodes is None else nodes
        prefill = max(1, count // 3)
        return "1B" if count == 1 else f"{prefill}P{count - prefill}D"
    if nodes is not None and len(parse_split(split)) != nodes:
        raise wrong("split", f"roles for {nodes} nodes", split)
    return split


def free_port(host: str, port: int = 0) -> int:
    """``port``, or for 0 any port, that could be listened on a moment ago.

    Raises:
        InputError: no such port, ``host`` is no address of this machine, or the port is taken.
    """
    if not 0 <= port < 65536:
        raise wrong("--port", "0 to 65535", port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as listener:
            free: int = listener.getsockname()[1]
            return free
    except (OSError, UnicodeError) as error:
        text = f"--host, --port: expected an address to listen on, got {host} port {port}: {error}"
        raise InputError(text) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(options: argparse.Namespace) -> int:
    from evolving_infra.cluster.serve import serve

    return serve(_cluster_config(options), options.run_dir)


def _replay(options: argparse.Namespace) -> int:
    from evolving_infra.replay.command import replay

    return replay(options, lambda fit_tokens: _cluster_config(options, fit_tokens))


def _demo(options: argparse.Namespace) -> int:
    if not EXAMPLES.is_dir():
        raise InputError(f"demo: expected the example traces of a checkout, got no {EXAMPLES}")
    return _replay(options)


def _role(options: argparse.Namespace) -> int:
    from evolving_infra.cluster.admin import change_role

    change = change_role(options.url, options.node, options.role)
    print(
        f"{change['node']}: {change['from']} -> {change['to']}, "
        f"{change['control_s'] * 1000:.0f} ms of control time"
    )
    return 0


def _trace_stats(options: argparse.Namespace) -> int:
    from evolving_infra.traces.load import load
    from evolving_infra.traces.stats import trace_stats

    for path in options.traces:
        print(trace_stats(load(path)).to_text())
    return 0


def _trace_convert(options: argparse.Namespace) -> int:
    from evolving_infra.traces.agentic_mooncake import write
    from evolving_infra.traces.load import load

    write(load(options.source), options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

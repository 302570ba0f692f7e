"""The live page: who may look, what is new, and what Prometheus reads."""

import http.client
import json
import re
import socket
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from run_folders import metrics_row, run_folder

from hybridrl import cli
from hybridrl.errors import ConfigError
from hybridrl.report import report_server
from hybridrl.report.live_report import CachedPart
from hybridrl.report.prometheus_metrics import render_prometheus_metrics
from hybridrl.report.report_server import ReportServer, ReportSite

TOKEN = "a-token-of-the-test"
DASHBOARD = Path(__file__).parents[2] / "docker" / "grafana-dashboard.json"


@pytest.fixture
def serve():
    servers = []

    def start(path, **options):
        servers.append(ReportServer(ReportSite(path), token=TOKEN, **options))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_only_who_has_the_token_sees_anything(serve, tmp_path):
    server = serve(run_folder(tmp_path / "run"))
    assert ask(server, f"/{TOKEN}/")[0] == 200
    for path in ("/", f"/{TOKEN}x/", "/versions", "/metrics", f"/x/{TOKEN}/", "/%00/"):
        status, body = ask(server, path)
        assert status == 404 and "run" not in body
    assert ask(server, f"/{TOKEN}")[0] == 301
    assert ask(server, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask(server, "/metrics", Authorization="Bearer wrong")[0] == 404


def test_a_page_of_another_name_is_refused(serve, tmp_path):
    server = serve(run_folder(tmp_path / "run"))
    assert ask(server, f"/{TOKEN}/", Host="evil.example")[0] == 403
    assert ask(server, f"/{TOKEN}/", Host=f"localhost:{server.server_port}")[0] == 200
    assert ask(server, f"/{TOKEN}/", Host="localhost:9000")[0] == 200  # the near end of a tunnel
    assert ask(server, f"/{TOKEN}/", Host="localhost.evil.example:9000")[0] == 403


def test_it_listens_on_this_machine_only(serve, tmp_path):
    assert serve(run_folder(tmp_path / "run")).server_address[0] == "127.0.0.1"


def test_what_is_new_has_another_version(serve, tmp_path):
    run = run_folder(tmp_path / "run")
    server = serve(run)
    before = json.loads(ask(server, f"/{TOKEN}/versions")[1])
    assert json.loads(ask(server, f"/{TOKEN}/versions")[1]) == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_row(4)) + "\n")
    after = json.loads(ask(server, f"/{TOKEN}/versions")[1])
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"head", "words", "curves", "state"}
    part = json.loads(ask(server, f"/{TOKEN}/part/curves")[1])
    assert part["runs"][0]["series"]["time/step"]["x"] == [1, 2, 3, 4]
    assert ask(server, f"/{TOKEN}/part/other")[0] == 404


def test_a_part_is_made_once_for_all_and_not_again_at_once():
    made, stamp = [], [1]
    part = CachedPart(lambda: made.append(1), lambda: stamp[0])
    assert {part.text() for _ in range(5)} == {"null"} and len(made) == 1
    first = part.version()
    part._due = float("inf")  # it was costly
    stamp[0] = 2
    assert part.version() == first and part.text() == "null" and len(made) == 1
    part._due = 0.0
    assert part.version() != first
    part.text()
    assert len(made) == 2


def test_a_folder_of_runs_is_a_table_with_links(serve, tmp_path):
    run_folder(tmp_path / "runs" / "one")
    run_folder(tmp_path / "runs" / "two", steps=5)
    (tmp_path / "runs" / "latest").symlink_to("two")
    run_folder(tmp_path / "elsewhere")
    server = serve(tmp_path / "runs")
    lines = json.loads(ask(server, f"/{TOKEN}/part/runs")[1])["runs"]
    assert [(one["name"], one["step"]) for one in lines] == [("two", 5), ("one", 3)]
    assert ask(server, f"/{TOKEN}/runs/one/")[0] == 200
    both = json.loads(ask(server, f"/{TOKEN}/runs/one,two/part/curves")[1])["runs"]
    assert [one["name"] for one in both] == ["one", "two"]
    for wrong in ("three", "..%2felsewhere", "latest", "one,three"):
        assert ask(server, f"/{TOKEN}/runs/{wrong}/")[0] == 404
    run_folder(tmp_path / "runs" / "three")
    assert ask(server, f"/{TOKEN}/runs/three/")[0] == 200


def test_several_look_at_once(serve, tmp_path):
    server = serve(run_folder(tmp_path / "run"))
    found = []
    looks = [
        threading.Thread(target=lambda: found.append(ask(server, f"/{TOKEN}/part/samples")))
        for _ in range(8)
    ]
    for look in looks:
        look.start()
    for look in looks:
        look.join()
    assert len(found) == 8 and len(set(found)) == 1 and found[0][0] == 200


def test_a_port_that_is_taken_is_a_sentence(serve, tmp_path):
    run = run_folder(tmp_path / "run")
    server = serve(run)
    with pytest.raises(ConfigError, match=rf"--port {server.server_port} is taken"):
        ReportServer(ReportSite(run), server.server_port)
    with pytest.raises(ConfigError, match="0 to 65535"):
        ReportServer(ReportSite(run), 99999)


def test_nothing_to_watch_is_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", str(tmp_path)])
    assert ended.value.code == 2 and "no run's folder" in capsys.readouterr().err


def test_a_token_file_is_made_for_this_user_and_kept(tmp_path):
    from hybridrl.commands.watch_command import _read_or_make_token

    file = tmp_path / "token"
    assert (
        _read_or_make_token(file) == _read_or_make_token(file)
        and file.stat().st_mode & 0o777 == 0o600
    )
    file.write_text("short")
    with pytest.raises(ConfigError, match="holds no token"):
        _read_or_make_token(file)


def test_prometheus_reads_the_newest_of_each_figure(tmp_path):
    run = run_folder(tmp_path / 'a"b')
    rows = [{"step": 1, "reward/mean": 0.5, "eval/x@8": 0.25}, {"step": 2, "reward/mean": 0.75}]
    text = render_prometheus_metrics({run: rows})
    assert 'hybridrl_reward_mean{run="a\\"b"} 0.75\n' in text
    assert 'hybridrl_eval_x_8{run="a\\"b"} 0.25\n' in text
    assert 'hybridrl_run_state{run="a\\"b",state="finished"} 1\n' in text
    line = re.compile(r"(# (HELP|TYPE) hybridrl_\w+ .+|hybridrl_\w+\{.*\} \S+)")
    assert all(line.fullmatch(one) for one in text.splitlines())
    named = [one.split()[2] for one in text.splitlines() if one.startswith("# TYPE")]
    assert len(named) == len(set(named))


def test_the_dashboard_asks_for_figures_that_there_are(serve, tmp_path):
    said = ask(serve(run_folder(tmp_path / "run")), f"/{TOKEN}/metrics")[1]
    there = {one.split("{")[0] for one in said.splitlines() if not one.startswith("#")}
    asked = set(re.findall(r"hybridrl_\w+(?=\{)", DASHBOARD.read_text()))
    assert len(asked) > 10 and asked <= there


def test_the_token_stands_on_no_command_line(monkeypatch):
    from hybridrl.commands.watch_command import _open_in_browser

    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    url = f"http://127.0.0.1:1/{TOKEN}/"
    with _open_in_browser(url):
        (address,) = opened
        file = Path(unquote(urlsplit(address).path))
        assert TOKEN not in address and f"url={url}" in file.read_text()
        assert file.stat().st_mode & 0o777 == 0o600
    assert not file.exists()


def test_connections_without_the_token_are_few_and_short(serve, tmp_path, monkeypatch):
    def closed(connection):
        connection.settimeout(60)
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True

    monkeypatch.setattr(report_server, "MOST_OPEN", 4)
    server = serve(run_folder(tmp_path / "run"))
    address = ("127.0.0.1", server.server_port)
    idle = [socket.create_connection(address, timeout=60) for _ in range(10)]
    assert all(map(closed, idle[:6]))
    assert ask(server, f"/{TOKEN}/")[0] == 200
    monkeypatch.setattr(report_server, "_REQUEST_TIMEOUT_S", 0.0)
    with socket.create_connection(address, timeout=60) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert closed(slow)
    for connection in idle:
        connection.close()

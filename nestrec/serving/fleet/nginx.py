"""nginx in front of several instances: its configuration, and the process.

nginx does not look into bodies, so the user is named by the header X-Nestrec-User (the id, or any stable hash of it),
and a deadline that nginx is to keep by X-Nestrec-Timeout-Ms. All requests of a user then meet the same instance, by
nginx's own consistent hash; requests without the header go anywhere and are computed in full, and events without it are
refused. What concerns all instances (health, what is to be erased) goes to the front process, which asks each of them.
The header X-Nestrec-Instance of an answer tells who gave it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nestrec.base.errors import UserError
from nestrec.serving.fleet import tied
from nestrec.serving.fleet.readiness_probes import listens

_GRACE_MS = 200
"""beyond a deadline: the instance's own answer says more"""
_POLL_S = 0.02
_TEMPLATE = """\
worker_processes auto;
daemon off;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    error_log stderr emerg;  # lesser ones print the request, and ids of users with it
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    client_max_body_size {max_body_bytes};
    client_body_buffer_size {max_body_bytes};  # a request never touches the disk
    client_header_timeout 10s; client_body_timeout 5s;
    map $http_x_nestrec_user $nestrec_key {{ default $http_x_nestrec_user; "" $request_id; }}
    map $http_x_nestrec_timeout_ms $nestrec_wait {{
        default "";
{waits}
    }}
    map $status $nestrec_problem {{
        default "the request cannot be served";
        400 "the request is malformed, or names no user in X-Nestrec-User";
        408 "the request did not arrive in time";
        413 "the body must have at most {max_body_bytes} bytes";
        "~^(414|431)$" "path and headers are too long";
        503 "no instance has answered in time";
    }}
    map $status $nestrec_retry {{ default ""; 503 1; }}
    upstream nestrec {{
        hash $nestrec_key consistent;
{servers}
        keepalive 64;
    }}
    upstream nestrec_front {{ server 127.0.0.1:{front_port}; }}
    server {{
        listen {address}:{port};
        server_tokens off;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $host;
        proxy_set_header X-Nestrec-Client $remote_addr;
        proxy_connect_timeout 500ms;
        proxy_next_upstream_tries {tries};
        # Ranking changes nothing, so it is tried again where an instance is lost in the middle of it.
        proxy_next_upstream error timeout non_idempotent;
        add_header X-Nestrec-Instance $upstream_addr always;
        error_page 400 403 404 405 408 413 414 416 501 505 /nestrec-problem;
        error_page 494 =431 /nestrec-problem;
        error_page 500 502 503 504 =503 /nestrec-problem;
        location = /nestrec-problem {{  # not by a name: a request that is no request has no path to keep
            internal;
            default_type application/json;
            add_header Retry-After $nestrec_retry always;
            return 200 '{{"error":{{"message":"$nestrec_problem"}}}}';
        }}
        location / {{
            if ($nestrec_wait) {{ rewrite ^ /nestrec-wait/$nestrec_wait last; }}
            proxy_read_timeout {longest_ms}ms; proxy_next_upstream_timeout {longest_ms}ms;
            proxy_pass http://nestrec;
        }}
{locations}
        location = /v1/events {{
{events_need}
            proxy_next_upstream off;
            proxy_read_timeout {default_ms}ms;
            proxy_pass http://nestrec;
        }}
        location ^~ /v1/admin/ {{ proxy_read_timeout 3600s; proxy_pass http://nestrec_front; }}
        location ^~ /v1/users/ {{ proxy_pass http://nestrec_front; }}
        location ^~ /health/ {{ proxy_pass http://nestrec_front; }}
        location = /v1/gateway {{ proxy_pass http://nestrec_front; }}
        location = /v1/live {{ proxy_pass http://nestrec_front; }}
        location = /metrics {{ proxy_pass http://nestrec_front; }}
    }}
}}
"""
_WAIT = """\
        location = /nestrec-wait/{ms} {{
            internal;
            proxy_read_timeout {until_ms}ms; proxy_next_upstream_timeout {until_ms}ms;
            proxy_pass http://nestrec$request_uri;
        }}"""


def nginx_config(
    ports: Sequence[int],
    *,
    front_port: int,
    host: str,
    port: int,
    folder: Path,
    max_body_bytes: int,
    longest_ms: int,
    default_ms: int,
    shares_histories: bool = False,
) -> str:
    """Configuration over instances on ports of this machine; `folder` takes nginx's own files.

    front_port: of the front process. longest_ms: longest deadline of a request, default_ms: of one that names none.
    shares_histories: any instance may take the events of any user.
    """
    waits = _waits_ms(longest_ms)
    servers = "\n".join(f"        server 127.0.0.1:{p} max_fails=1 fail_timeout=1s;" for p in ports)
    return _TEMPLATE.format(
        folder=folder,
        servers=servers,
        address=f"[{host}]" if ":" in host else host or "0.0.0.0",
        port=port,
        max_body_bytes=max_body_bytes,
        tries=len(ports),
        front_port=front_port,
        longest_ms=longest_ms + 5 * _GRACE_MS,
        default_ms=default_ms + _GRACE_MS,
        events_need="" if shares_histories else '            if ($http_x_nestrec_user = "") { return 400; }',
        waits="\n".join(f'        "~^{pattern}$" {ms};' for ms, pattern in waits.items()),
        locations="\n".join(_WAIT.format(ms=ms, until_ms=ms + _GRACE_MS) for ms in waits),
    )


def _waits_ms(longest_ms: int) -> dict[int, str]:
    """Deadlines that nginx can keep, each with the numbers that are rounded up to it: it has no arithmetic."""
    waits = {100: "0*([0-9]{1,2}|100)"}
    digits = 2
    while 10**digits < longest_ms:
        first = 10**digits
        rest = f"[0-9]{{{digits}}}"
        for high, leading in ((2, "1"), (5, "[2-4]"), (10, "[5-9]")):
            waits[high * first] = f"0*({leading}{rest}|{high}{'0' * digits})"
        digits += 1
    return {ms: pattern for ms, pattern in waits.items() if ms <= longest_ms}


def nginx_program() -> str:
    """`UserError` where it is not installed."""
    program = shutil.which("nginx")
    if program is None:
        remedy = "install nginx, or use --front gateway"
        raise UserError("is not installed", field="front", value="nginx", remedy=remedy)
    return program


@contextlib.contextmanager
def running_nginx(
    configured: Callable[[Path, list[int]], str],
    ports: list[int],
    host: str,
    port: int,
    is_stopping: Callable[[], bool],
) -> "Iterator[tuple[subprocess.Popen[bytes], Callable[[list[int]], None]]]":
    """The process, once it listens, and what gives it other instances; ended gracefully at the end, and when this
    process is gone.

    Entered by the main thread. configured: its configuration, given the folder for its files and ports of instances.
    """
    program = nginx_program()
    with tempfile.TemporaryDirectory(prefix="nestrec-nginx-") as name:
        (Path(name) / "nginx.conf").write_text(configured(Path(name), ports))

        def configure_again(ports: list[int]) -> None:
            """Requests under way end as they began."""
            (Path(name) / "nginx.conf").write_text(configured(Path(name), ports))
            process.send_signal(signal.SIGHUP)

        tie = [sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), "SIGQUIT"]
        # A group of its own: Ctrl-C is for whoever waits, who then asks it to end gracefully.
        process = subprocess.Popen([*tie, program, "-e", "stderr", "-p", name, "-c", "nginx.conf"], process_group=0)
        try:
            while not listens(port, "127.0.0.1" if host in ("", "0.0.0.0") else host) and not is_stopping():
                if process.poll() is not None:
                    raise UserError("did not start", field="front", value="nginx", remedy="see what it wrote above")
                time.sleep(_POLL_S)
            yield process, configure_again
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait()

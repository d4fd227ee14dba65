"""nginx in front of several instances: its configuration, and the process.

nginx does not look into bodies, so the user is named by the header X-Nestrec-User (the id, or any stable hash of it).
All requests of a user then meet the same instance, by nginx's own consistent hash; requests without the header go
anywhere and are computed in full. The header X-Nestrec-Instance of an answer tells who gave it.
"""

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nestrec.base.errors import UserError

_TEMPLATE = """\
worker_processes auto;
daemon off;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    client_max_body_size {max_body_bytes};
    client_body_buffer_size {max_body_bytes};  # a request never touches the disk
    client_header_timeout 10s; client_body_timeout 5s;
    map $http_x_nestrec_user $nestrec_key {{ default $http_x_nestrec_user; "" $request_id; }}
    upstream nestrec {{
        hash $nestrec_key consistent;
{servers}
        keepalive 64;
    }}
    server {{
        listen {host}:{port};
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $host;
        proxy_set_header X-Nestrec-Client $remote_addr;
        proxy_connect_timeout 500ms;
        proxy_read_timeout {timeout_s}s;
        proxy_next_upstream_tries {tries};
        add_header X-Nestrec-Instance $upstream_addr always;
        location / {{
            # Ranking changes nothing, so it is tried again where an instance is lost in the middle of it.
            proxy_next_upstream error timeout non_idempotent;
            proxy_pass http://nestrec;
        }}
        location /v1/events {{
            proxy_next_upstream off;
            proxy_pass http://nestrec;
        }}
    }}
}}
"""


def nginx_config(
    ports: Sequence[int], *, host: str, port: int, folder: Path, max_body_bytes: int, timeout_s: int
) -> str:
    """Configuration over instances on ports of this machine; `folder` takes nginx's own files."""
    servers = "\n".join(f"        server 127.0.0.1:{p} max_fails=1 fail_timeout=1s;" for p in ports)
    return _TEMPLATE.format(
        folder=folder, servers=servers, host=host, port=port, max_body_bytes=max_body_bytes, timeout_s=timeout_s,
        tries=len(ports),
    )  # fmt: skip


@contextlib.contextmanager
def running_nginx(
    ports: Sequence[int], *, host: str, port: int, max_body_bytes: int, timeout_s: int
) -> "Iterator[subprocess.Popen[bytes]]":
    """The process; ended gracefully at the end."""
    program = shutil.which("nginx")
    if program is None:
        raise UserError(
            "is not installed", field="front", value="nginx", remedy="install nginx, or use --front gateway"
        )
    with tempfile.TemporaryDirectory(prefix="nestrec-nginx-") as name:
        folder = Path(name)
        config = nginx_config(
            ports, host=host, port=port, folder=folder, max_body_bytes=max_body_bytes, timeout_s=timeout_s
        )
        (folder / "nginx.conf").write_text(config)
        # A group of its own: Ctrl-C is for whoever waits, who then asks it to end gracefully.
        process = subprocess.Popen([program, "-e", "stderr", "-p", name, "-c", "nginx.conf"], process_group=0)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait()

"""Certificates for tests of TLS."""

import subprocess


def make_certificate(folder, name, days=2):
    """(certificate, key) for this machine; openssl makes it, so that no private key lies in the repository."""
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            str(days),
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            paths[1],
            "-out",
            paths[0],
        ],
        check=True,
        capture_output=True,
    )
    return paths

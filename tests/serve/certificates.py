"""TLS certificates for tests."""

import subprocess


def make_certificate(folder, name, days=2):
    """Create a self-signed certificate for 127.0.0.1 with openssl, so that the repository contains no private key.

    Args:
        folder: Output folder.
        name: Common name, and stem of the file names.
        days: Validity in days.

    Returns:
        Paths of the certificate and of its private key.
    """
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

# What nvidia-cuda-mps-control does as far as anybody sees from outside: -f serves in the foreground, without arguments
# commands are read from standard input. It ends itself when its pipe directory is taken away, with the test's folder.
# NVIDIA's own is in tests/system/test_real_daemon.py.
import json
import os
import socket
import sys
from pathlib import Path

os.chdir(os.environ["CUDA_MPS_PIPE_DIRECTORY"])  # sockets' paths are short


def serve() -> None:
    started = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "LD_"))}
    Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "started").write_text(json.dumps(started))
    Path("nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    Path("control_lock").touch()
    Path("control_lock").chmod(0o666)
    os.mkfifo("log")
    Path("/dev/shm/cuda.shm").write_text("of the daemon")
    Path("control").unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("control")
    Path("control").chmod(0o666)
    listener.listen()
    listener.settimeout(1)
    threads, said = "100.0", ""
    while Path("control").exists() and not said.startswith("quit"):
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        with client:
            said = client.recv(4096).decode().strip()
            word, *values = said.split()
            if word == "set_default_active_thread_percentage":
                threads = f"{float(values[0])}"
            print(f"Cmd:{said}", flush=True)  # it writes no file of its own into its log directory
            client.sendall(f"{threads}\n".encode() if "thread_percentage" in word else b"\n")


def ask() -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("control")
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    connection.sendall(sys.stdin.read().encode())
    print(connection.recv(4096).decode(), end="")


serve() if sys.argv[1:] == ["-f"] else ask()

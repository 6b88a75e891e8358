"""What the node's HTTP servers share: they look no names up, and they rest while the system has no descriptor left."""

from __future__ import annotations

import errno
import socketserver
import time
from http.server import ThreadingHTTPServer
from typing import Any, Final

ACCEPT_PAUSE_SECONDS: Final = 0.5
"""Until the next try where a connection cannot be taken."""

_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ListeningServer(ThreadingHTTPServer):
    """A server with a thread for each connection."""

    allow_reuse_port = False
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind, and leave out what the library's server does next.

        It asks the name service what the own address is called, which nothing here wants to know, and which takes as
        long as a name service that does not answer.
        """
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)

    def get_request(self) -> Any:
        """Take a connection that waits.

        Raises:
            OSError: The system refused; it still waits, so that the next try would come at once.
        """
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

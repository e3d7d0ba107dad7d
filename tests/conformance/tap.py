"""An HTTP proxy on a port of its own that records requests and answers. Standard library only."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# They belong to a connection, not to a message.
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}


class Exchange:
    """A request and its answer, with header names in lower case."""

    def __init__(self, method, path, request_headers, request_body):
        self.method = method
        self.path = path
        self.request_headers = request_headers
        self.request_body = request_body
        self.status = None
        self.answer_headers = {}
        self.answer_body = b""
        self.is_whole = False


def end_to_end(headers):
    return {name.lower(): value for name, value in headers if name.lower() not in HOP_BY_HOP}


class Tap:
    def __init__(self, upstream):
        self.upstream = urlsplit(upstream).netloc
        self.exchanges = []
        handler = type("Handler", (Handler,), {"tap": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def relay(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        exchange = Exchange(self.command, self.path, end_to_end(self.headers.items()), body)
        self.tap.exchanges.append(exchange)
        engine = http.client.HTTPConnection(self.tap.upstream)
        try:
            engine.request(self.command, self.path, body or None, exchange.request_headers)
            self.answer(exchange, engine.getresponse())
        except OSError:
            # One side has gone: so does the other.
            self.close_connection = True
        finally:
            engine.close()

    def answer(self, exchange, answer):
        exchange.status = answer.status
        exchange.answer_headers = end_to_end(answer.getheaders())
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        is_chunked = "content-length" not in exchange.answer_headers
        if is_chunked:
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while piece := answer.read1(65536):
            exchange.answer_body += piece
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
        exchange.is_whole = True
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_DELETE = relay

    def log_message(self, *_):
        pass

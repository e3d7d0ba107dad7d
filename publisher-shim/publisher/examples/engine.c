/* The engine of engine.py in C.
 * cc engine.c -lwarmroute_publisher -o engine; engine HTTP_PORT EVENTS_PORT REPLAY_PORT */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "warmroute_publisher.h"

enum { BLOCK = 16, CAPACITY = 64, TOKENS_MAX = 1 << 16, REQUEST_MAX = 1 << 20 };

static WarmroutePublisher *publisher;
static uint64_t held[CAPACITY]; /* hashes of blocks, the oldest first */
static size_t held_count;

static void check(int code) {
  if (code == WARMROUTE_OK) return;
  fprintf(stderr, "%s\n", warmroute_error_text(code));
  exit(1);
}

static int is_held(uint64_t hash) {
  for (size_t i = 0; i < held_count; i++)
    if (held[i] == hash) return 1;
  return 0;
}

/* Caches a prompt. Returns how many of its tokens were cached before. */
static size_t compute(const uint32_t *tokens, size_t count) {
  uint64_t hash = 14695981039346656037u, parent = 0; /* FNV-1a */
  size_t hit = 0;
  for (size_t end = BLOCK; end <= count; end += BLOCK, parent = hash) {
    const uint32_t *block = tokens + end - BLOCK;
    for (size_t i = 0; i < BLOCK; i++) hash = (hash ^ block[i]) * 1099511628211u;
    if (!is_held(hash)) {
      if (held_count == CAPACITY) {
        check(warmroute_publisher_removed(publisher, held, 1));
        memmove(held, held + 1, --held_count * sizeof *held);
      }
      held[held_count++] = hash;
      WarmrouteStored stored = {.block_hashes = &hash, .block_count = 1, .token_ids = block,
                                .token_count = BLOCK, .parent_hash = end > BLOCK ? &parent : NULL};
      check(warmroute_publisher_stored(publisher, &stored));
    } else if (hit == end - BLOCK && end < count) {
      hit = end;
    }
  }
  return hit;
}

static void complete(const char *body, char *answer) {
  static uint32_t tokens[TOKENS_MAX];
  size_t count = 0;
  char *at = strstr(body, "\"prompt\"");
  at = at ? strchr(at, '[') : NULL;
  while (at && *at != ']' && count < TOKENS_MAX) tokens[count++] = strtoul(at + 1, &at, 10);
  sprintf(answer, "{\"object\":\"text_completion\",\"model\":\"own\",\"choices\":[{\"index\":0,"
          "\"text\":\"!\",\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":%zu,"
          "\"completion_tokens\":1,\"total_tokens\":%zu,\"prompt_tokens_details\":"
          "{\"cached_tokens\":%zu}}}", count, count + 1, compute(tokens, count));
}

static void serve(int client) {
  static char request[REQUEST_MAX];
  char answer[1024] = "{}", head[256];
  const char *status = "200 OK";
  request[0] = 0;
  size_t got = 0, wanted = REQUEST_MAX - 1;
  while (got < wanted) {
    ssize_t read_now = read(client, request + got, wanted - got);
    if (read_now <= 0) break;
    request[got += read_now] = 0;
    char *body = strstr(request, "\r\n\r\n"), *length = strcasestr(request, "content-length:");
    size_t size = body ? body + 4 - request + (length ? strtoul(length + 15, NULL, 10) : 0) : wanted;
    if (size < wanted) wanted = size;
  }
  if (!strncmp(request, "GET /v1/models ", 15)) {
    strcpy(answer, "{\"object\":\"list\",\"data\":[{\"id\":\"own\",\"object\":\"model\"}]}");
  } else if (!strncmp(request, "POST /v1/completions ", 21)) {
    complete(strstr(request, "\r\n\r\n"), answer);
  } else if (!strncmp(request, "POST /reset ", 12)) {
    held_count = 0;
    check(warmroute_publisher_cleared(publisher));
  } else if (strncmp(request, "GET /health ", 12)) {
    status = "404 Not Found";
  }
  sprintf(head, "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n"
          "Connection: close\r\n\r\n", status, strlen(answer));
  if (write(client, head, strlen(head)) < 0 || write(client, answer, strlen(answer)) < 0) perror("write");
  close(client);
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  char events[64], replay[64];
  snprintf(events, sizeof events, "tcp://127.0.0.1:%s", argv[2]);
  snprintf(replay, sizeof replay, "tcp://127.0.0.1:%s", argv[3]);
  WarmrouteOptions options = {.events_endpoint = events, .replay_endpoint = replay, .block_size = BLOCK};
  check(warmroute_publisher_new(&options, &publisher));
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int server = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
  setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(server, (struct sockaddr *)&address, sizeof address) || listen(server, 64)) return 1;
  printf("{\"port\": %s}\n", argv[1]);
  fflush(stdout);
  for (;;) serve(accept(server, NULL, NULL));
}

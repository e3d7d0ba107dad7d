/* Warmroute's publisher: an engine of your own publishes which blocks of its prefix cache it holds,
 * and Warmroute routes prompts by them. A shim or an embedded router reads both sockets.
 *
 * Blocks. A block is `block_size` consecutive token ids of a prompt. Its hash is any 64-bit number
 * that names it with everything before it: equal hashes mean equal prefixes. Each `stored` counts a
 * copy of a block, each `removed` drops one; a block is held while it has a copy. Publish a block
 * when a request could hit it, and its removal before its memory is used again.
 *
 * Ownership. A publisher belongs to the caller, from `new` to `free`. All arguments are read during
 * the call only: nothing of the caller's is kept.
 *
 * Threads. All calls but `free` may come from several threads at once; their order is the order of
 * the events. `free` must be the last call. A publisher does not survive `fork`.
 *
 * Time and memory. No call waits for a reader. The last 10,000 events, at most 64 MiB, are kept for
 * replays; a reader that missed more knows its picture to be partial.
 *
 * Errors. 0 is success; `warmroute_error_text` has the meaning of the others. After
 * WARMROUTE_ERROR_SOCKET of an event, the event is in the replay, and must not be published again. */
#ifndef WARMROUTE_PUBLISHER_H
#define WARMROUTE_PUBLISHER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  WARMROUTE_OK = 0,
  WARMROUTE_ERROR_INVALID_ARGUMENT = 1, /* null, misaligned, zero, or no UTF-8 */
  WARMROUTE_ERROR_WRONG_LENGTH = 2,     /* no block, or tokens that are not whole blocks */
  WARMROUTE_ERROR_TOO_LARGE = 3,        /* an event of more than 16 MiB */
  WARMROUTE_ERROR_SOCKET = 4,
  WARMROUTE_ERROR_INTERNAL = 5
};

typedef struct WarmroutePublisher WarmroutePublisher;

typedef struct WarmrouteOptions {
  const char *events_endpoint; /* is bound, such as "tcp://0.0.0.0:5557" */
  const char *replay_endpoint; /* likewise; NULL: losses cannot be seen, and nothing is `exact` */
  uint32_t dp_rank;            /* data-parallel rank: each has a publisher, one port higher */
  uint32_t block_size;         /* tokens in a block */
} WarmrouteOptions;

/* Consecutive blocks of one prompt. */
typedef struct WarmrouteStored {
  const uint64_t *block_hashes;
  size_t block_count;
  const uint32_t *token_ids;
  size_t token_count;          /* block_count * block_size */
  const uint64_t *parent_hash; /* the block before the first one; NULL: the prompt starts here */
  const char *lora_name;       /* NULL without an adapter */
  const char *cache_salt;      /* NULL without a salt */
} WarmrouteStored;

int warmroute_publisher_new(const WarmrouteOptions *options, WarmroutePublisher **publisher);
int warmroute_publisher_stored(const WarmroutePublisher *publisher, const WarmrouteStored *stored);
int warmroute_publisher_removed(const WarmroutePublisher *publisher, const uint64_t *block_hashes,
                                size_t block_count);
/* The whole cache is empty. */
int warmroute_publisher_cleared(const WarmroutePublisher *publisher);
/* Closes the sockets. NULL is ignored. */
void warmroute_publisher_free(WarmroutePublisher *publisher);
/* Static text. */
const char *warmroute_error_text(int code);

#ifdef __cplusplus
}
#endif

#endif

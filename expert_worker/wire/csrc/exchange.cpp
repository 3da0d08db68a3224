// The undisturbed way of a layer call through the cells of wire/slots.py, without Python between a store and a bell.
//
// Layout and meaning are those of cell_codec.py, which reads and writes the same bytes: whatever is not a plain answer to
// what was asked is left in its cell for it. Memory belongs to the caller; nothing here allocates or keeps anything.
#include "one_token.h"
#include "spin.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Sums element by element have the same bits in any width: take the widest that the processor has.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define ANY_WIDTH __attribute__((target_clones("avx2", "default")))
#else
#define ANY_WIDTH
#endif

namespace {

constexpr int64_t kCall = 0x45565231, kPartial = 0x45565232;
constexpr int kCounters = 7;
constexpr int kMostRanks = 64;  // of one token's call: exchange.MOST_RANKS

struct Cell {  // slots.Cell
  int64_t turn;
  int64_t length;
  char data[1];
};

struct CallHead {  // cell_codec._CALL; int32 expert ids follow
  int64_t kind, incarnation, sequence, layer, slot, tokens, checksum, count;
};

struct PartialBody {  // cell_codec._PARTIAL
  int64_t kind, incarnation, sequence, layer, rows, checksum;
  double compute_s;
  int64_t counters[kCounters];
};

int64_t turn_of(const Cell* cell) { return __atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE); }

void publish(Cell* cell, int64_t length, int bell) {
  __atomic_store_n(&cell->length, length, __ATOMIC_RELAXED);
  __atomic_store_n(&cell->turn, cell->turn + 1, __ATOMIC_RELEASE);
  eventfd_write(bell, 1);  // a full counter still rings
}

void hush(int bell) {
  eventfd_t count;
  eventfd_read(bell, &count);
}

bool finite(uint32_t bits) { return (bits & 0x7f800000u) != 0x7f800000u; }

}  // namespace

// One rank as the coordinator's end sees it (exchange.Rank).
struct Rank {
  Cell* request;
  const Cell* reply;
  const char* result;
  int32_t request_bell, reply_bell;
  int64_t seen;  // turn of the newest reply that was taken
  int64_t incarnation, sequence, layer;  // of the newest call
  int64_t rows, checksum, counters[kCounters];  // of the newest plain reply
  double compute_s;
};

// A worker's end and the newest call that it took (exchange.Port).
struct Port {
  const Cell* request;
  Cell* reply;
  int32_t request_bell, reply_bell, socket, lifeline;
  int64_t seen, incarnation;
  int64_t capacity;  // bytes of a message in the request cell
  int64_t sequence, layer, slot, tokens, checksum, count;
  const int32_t* experts;  // inside the request cell
};

// Where one token's layer calls are made (exchange.Desk): the slots' memory, the form of a token, who has the newest call.
struct Desk {
  Rank* ranks;
  char* slots;  // slot by slot: x at its start, then expert ids, then route weights
  int64_t slot_bytes, ids_at, weights_at;
  int64_t hidden, itemsize, top_k;
  int64_t exact;  // results are rows in the activation's dtype, else one fp32 partial
  int64_t spin_ns;
  int64_t took_ns[2];  // how long the answers to the last two calls took
  int32_t n, which[kMostRanks];
};

constexpr int64_t kLongestNap = 20'000'000;  // ns: what took longer is no measure for the next call

namespace {

void hand_over(Rank& rank, const CallHead& head, const int64_t* experts) {
  rank.incarnation = head.incarnation, rank.sequence = head.sequence, rank.layer = head.layer;
  memcpy(rank.request->data, &head, sizeof head);
  int32_t* ids = reinterpret_cast<int32_t*>(rank.request->data + sizeof head);
  for (int64_t e = 0; e < head.count; ++e) ids[e] = static_cast<int32_t>(experts[e]);
  publish(rank.request, static_cast<int64_t>(sizeof head) + 4 * head.count, rank.request_bell);
}

// Whether every rank of `which` has answered its newest call plainly; nothing is taken.
bool plain(const Rank* ranks, const int32_t* which, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    const Rank& rank = ranks[which[i]];
    PartialBody body;
    if (rank.reply->length != static_cast<int64_t>(sizeof body)) return false;
    memcpy(&body, rank.reply->data, sizeof body);
    if (body.kind != kPartial || body.incarnation != rank.incarnation || body.sequence != rank.sequence || body.layer != rank.layer) return false;
  }
  return true;
}

void take(Rank* ranks, const int32_t* which, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    Rank& rank = ranks[which[i]];
    PartialBody body;
    rank.seen = turn_of(rank.reply);
    memcpy(&body, rank.reply->data, sizeof body);
    rank.rows = body.rows, rank.checksum = body.checksum, rank.compute_s = body.compute_s;
    memcpy(rank.counters, body.counters, sizeof body.counters);
  }
}

// out += row, widened.
ANY_WIDTH void add_row(const char* row, int64_t hidden, int64_t itemsize, float* out) {
  if (itemsize == 4) {
    const float* from = reinterpret_cast<const float*>(row);
    for (int64_t h = 0; h < hidden; ++h) out[h] += from[h];
  } else {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(row);
    for (int64_t h = 0; h < hidden; ++h) {
      const uint32_t bits = static_cast<uint32_t>(from[h]) << 16;
      float value;
      memcpy(&value, &bits, 4);
      out[h] += value;
    }
  }
}

ANY_WIDTH void add_floats(const float* from, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] += from[i];
}

ANY_WIDTH bool all_finite(const float* values, int64_t count) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, 4);
    bad |= !finite(bits);
  }
  return !bad;
}

}  // namespace

// A worker's progress record (heartbeat.Heart); others read it meanwhile, so each word is one store.
struct Record {
  int64_t incarnation, pid, state, progress, layer, sequence, calls, at_ns;
};

// How calls of one token are served without Python (exchange.Turn).
struct Turn {
  int64_t (*compute)(void* lane, const OneToken* call);  // one_token.h
  void* lane;
  Record* record;
  const char* slots;
  int64_t slot_bytes, ids_at, weights_at, num_slots, num_experts;
  void* out;
  const int64_t* counters;
};

EXPORT int32_t evrun_exchange_abi() { return 4; }

// batch: per call rank, incarnation, sequence, layer, slot, tokens, checksum, count, then count expert ids.
EXPORT void evrun_submit(Rank* ranks, const int64_t* batch, int32_t calls) {
  for (int32_t i = 0; i < calls; ++i) {
    Rank& rank = ranks[*batch++];
    CallHead head;
    head.kind = kCall;
    memcpy(&head.incarnation, batch, 7 * sizeof(int64_t));
    hand_over(rank, head, batch + 7);
    batch += 7 + head.count;
  }
}

// The whole sending side of one token's layer call: its activation and route into the slot, the calls into the cells.
// batch: number of ranks, sequence of the first one's call, layer, slot; then per rank, ascending: rank, incarnation, count,
// expert ids.
EXPORT void evrun_send(Desk* desk, const int64_t* batch, const void* x, const void* ids, const void* weights) {
  desk->n = static_cast<int32_t>(batch[0]);
  CallHead head = {kCall, 0, batch[1], batch[2], batch[3], 1, 0, 0};
  char* to = desk->slots + head.slot * desk->slot_bytes;
  memcpy(to, x, desk->hidden * desk->itemsize);
  memcpy(to + desk->ids_at, ids, desk->top_k * 4);
  memcpy(to + desk->weights_at, weights, desk->top_k * 4);
  batch += 4;
  for (int32_t i = 0; i < desk->n; ++i, ++head.sequence) {
    desk->which[i] = static_cast<int32_t>(batch[0]);
    head.incarnation = batch[1], head.count = batch[2];
    hand_over(desk->ranks[batch[0]], head, batch + 3);
    batch += 3 + head.count;
  }
}

namespace {

// Waits until every rank of `which` has replied: naps for nap_ns, spins for spin_ns, then sleeps. Asleep, it wakes when a
// bell rings, `others` turns readable or the time is over. Returns 1 when all replies are plain answers to the newest calls,
// else 0. Nothing is taken.
int32_t wait_for(const Rank* ranks, const int32_t* which, int32_t n, int32_t others, int64_t nap_ns, int64_t spin_ns, int32_t timeout_ms) {
  const int64_t awake = now_ns() + nap_ns, until = awake + spin_ns;
  for (bool nap = nap_ns > 0, spin = spin_ns > 0;;) {
    int32_t missing = n - 1;  // sleep for the last one: those before it are likely to be there when it wakes us
    while (missing >= 0 && turn_of(ranks[which[missing]].reply) != ranks[which[missing]].seen) --missing;
    if (missing < 0) return plain(ranks, which, n);
    const int64_t left = nap ? awake - now_ns() : 0;
    nap = left > 0;
    if (spin && !nap) {
      relax();
      spin = now_ns() < until;
      continue;
    }
    pollfd fds[2] = {{ranks[which[missing]].reply_bell, POLLIN, 0}, {others, POLLIN, 0}};
    const timespec short_time = {0, left};
    const int ready = nap ? ppoll(fds, 2, &short_time, nullptr) : poll(fds, 2, timeout_ms);
    if (nap && ready == 0) continue;
    if (fds[0].revents) hush(fds[0].fd);
    if (ready < 0 && errno == EINTR) return 0;  // signals are Python's business
    if (fds[1].revents || ready == 0) {
      if (turn_of(ranks[which[missing]].reply) == ranks[which[missing]].seen) return 0;
    }
  }
}

}  // namespace

// For the ranks that have the newest call of a desk. Where the last two calls took long (their rows crossed a link) this one
// probably does: the wait naps and spins around the time when they ended, for a sleeper is late and comes back to cold caches.
EXPORT int32_t evrun_wait(Desk* desk, int32_t others, int32_t timeout_ms) {
  const int64_t began = now_ns(), took = desk->took_ns[0] < desk->took_ns[1] ? desk->took_ns[0] : desk->took_ns[1];
  const bool nap = desk->spin_ns && took > 4 * desk->spin_ns && took < kLongestNap;
  const int64_t nap_ns = nap ? took - 2 * desk->spin_ns : 0, spin_ns = nap ? 3 * desk->spin_ns : desk->spin_ns;
  if (!wait_for(desk->ranks, desk->which, desk->n, others, nap_ns, spin_ns, timeout_ms)) return 0;
  desk->took_ns[0] = desk->took_ns[1];
  desk->took_ns[1] = now_ns() - began;
  return 1;
}

// The plain answers are taken when all are.
EXPORT int32_t evrun_gather(Rank* ranks, const int32_t* which, int32_t n, int32_t others, int64_t spin_ns, int32_t timeout_ms) {
  if (!wait_for(ranks, which, n, others, 0, spin_ns, timeout_ms)) return 0;
  take(ranks, which, n);
  return 1;
}

enum Woken { kTimeout = 0, kCallTaken = 1, kOdd = 2, kOther = 3 };

// A worker's wait. kCallTaken: a call for this incarnation, its fields are in the port; kOdd: another message lies in the
// cell; kOther: the socket or the lifeline is readable.
EXPORT int32_t evrun_receive(Port* port, int64_t spin_ns, int32_t timeout_ms) {
  const int64_t until = now_ns() + spin_ns;
  for (bool spin = spin_ns > 0, slept = false;;) {
    const int64_t turn = turn_of(port->request);
    if (turn != port->seen) {
      CallHead head;
      const int64_t length = port->request->length;
      if (length < static_cast<int64_t>(sizeof head) || length > port->capacity) return kOdd;
      memcpy(&head, port->request->data, sizeof head);
      const int64_t ids = (length - static_cast<int64_t>(sizeof head)) / 4;
      if (head.kind != kCall || head.incarnation != port->incarnation || head.count != ids) return kOdd;
      port->seen = turn;
      memcpy(&port->sequence, &head.sequence, 6 * sizeof(int64_t));
      port->experts = reinterpret_cast<const int32_t*>(port->request->data + sizeof head);
      return kCallTaken;
    }
    if (spin) {
      relax();
      spin = now_ns() < until;
      continue;
    }
    if (slept) return kTimeout;
    pollfd fds[3] = {{port->request_bell, POLLIN, 0}, {port->socket, POLLIN, 0}, {port->lifeline, POLLIN, 0}};
    const int ready = poll(fds, 3, timeout_ms);
    if (fds[0].revents) hush(fds[0].fd);
    if (ready > 0 && (fds[1].revents || fds[2].revents)) return kOther;
    slept = !fds[0].revents;  // a ring may be an old one: look, then sleep again
  }
}

EXPORT void evrun_reply(Port* port, int64_t rows, int64_t checksum, double compute_s, const int64_t* counters) {
  PartialBody body = {kPartial, port->incarnation, port->sequence, port->layer, rows, checksum, compute_s, {}};
  memcpy(body.counters, counters, sizeof body.counters);
  memcpy(port->reply->data, &body, sizeof body);
  publish(port->reply, sizeof body, port->reply_bell);
}

namespace {

enum State { kReady = 1, kServing = 2 };  // heartbeat.STATES

void store(int64_t& word, int64_t value) { __atomic_store_n(&word, value, __ATOMIC_RELAXED); }

void beat(void* memory) {
  Record* record = static_cast<Record*>(memory);
  store(record->progress, record->progress + 1);
  store(record->at_ns, now_ns());
}

bool fits(const Turn& turn, const Port& port) {
  if (port.tokens != 1 || port.checksum || port.slot < 0 || port.slot >= turn.num_slots || port.count < 1) return false;
  for (int64_t i = 1; i < port.count; ++i)
    if (port.experts[i - 1] >= port.experts[i]) return false;
  return port.experts[0] >= 0 && port.experts[port.count - 1] < turn.num_experts;
}

}  // namespace

// evrun_receive, but calls of one token are served on the way. kCallTaken: a call for Python.
EXPORT int32_t evrun_serve(Port* port, const Turn* turn, int64_t spin_ns, int32_t timeout_ms) {
  for (;;) {
    const int32_t woken = evrun_receive(port, spin_ns, timeout_ms);
    if (woken != kCallTaken || !fits(*turn, *port)) return woken;
    Record* record = turn->record;
    store(record->state, kServing);
    store(record->layer, port->layer);
    store(record->sequence, port->sequence);
    beat(record);
    const int64_t started = record->at_ns;
    const char* slot = turn->slots + port->slot * turn->slot_bytes;
    const OneToken call = {port->layer, port->count, port->experts, slot, reinterpret_cast<const int32_t*>(slot + turn->ids_at),
                           reinterpret_cast<const float*>(slot + turn->weights_at), turn->out, beat, record};
    const int64_t rows = turn->compute(turn->lane, &call);
    if (rows < 0) return kCallTaken;
    store(record->calls, record->calls + 1);
    evrun_reply(port, rows, -1, static_cast<double>(now_ns() - started) * 1e-9, turn->counters);
    store(record->state, kReady);
    beat(record);
  }
}

// A lane that computes nothing (`evrun bench ipc`): what is left is the way there and back.
EXPORT int64_t evrun_empty_lane(void*, const OneToken* call) { return call->count; }

// out[i] = parts[0][i] + parts[1][i] + ... in this order. Returns whether every sum is finite.
EXPORT int32_t evrun_add_partials(const float* const* parts, int32_t n, int64_t count, float* out) {
  constexpr int64_t kBlock = 1024;  // the sums of a block stay in the first-level cache while the parts pass
  bool good = true;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t size = count - start < kBlock ? count - start : kBlock;
    float* to = out + start;
    memcpy(to, parts[0] + start, size * sizeof(float));
    for (int32_t p = 1; p < n; ++p) add_floats(parts[p] + start, size, to);
    good &= all_finite(to, size);
  }
  return good;
}

// Rows -> sums, token by token in ascending expert id (combine.combine_rows). next[e]: first row of expert e, rows of an
// expert follow each other by token; it is advanced. Ids of a token are distinct. Returns whether every sum is finite.
EXPORT int32_t evrun_add_rows(const char** next, const int32_t* ids, int64_t tokens, int32_t top_k, int64_t hidden, int32_t itemsize,
                              float* out) {
  bool good = true;
  for (int64_t t = 0; t < tokens; ++t, ids += top_k, out += hidden) {
    for (int64_t h = 0; h < hidden; ++h) out[h] = 0.0f;
    int32_t last = -1;
    for (int32_t k = 0; k < top_k; ++k) {
      int32_t expert = INT32_MAX;
      for (int32_t j = 0; j < top_k; ++j)
        if (ids[j] > last && ids[j] < expert) expert = ids[j];
      if (expert == INT32_MAX) break;
      last = expert;
      add_row(next[expert], hidden, itemsize, out);
      next[expert] += hidden * itemsize;
    }
    good &= all_finite(out, hidden);
  }
  return good;
}

// The sum of one token's layer call that evrun_wait found answered, in the orders of the two functions above. Takes the
// answers and returns 1 when each has as many rows as it was asked for and the sum is finite; else takes nothing.
EXPORT int32_t evrun_sum(const Desk* desk, float* out) {
  const CallHead* calls[kMostRanks];
  const float* parts[kMostRanks];
  int64_t done[kMostRanks] = {}, total = 0;
  for (int32_t i = 0; i < desk->n; ++i) {
    const Rank& rank = desk->ranks[desk->which[i]];
    calls[i] = reinterpret_cast<const CallHead*>(rank.request->data);
    parts[i] = reinterpret_cast<const float*>(rank.result);
    if (reinterpret_cast<const PartialBody*>(rank.reply->data)->rows != calls[i]->count) return 0;
    total += calls[i]->count;
  }
  bool good;
  if (!desk->exact) {
    good = evrun_add_partials(parts, desk->n, desk->hidden, out);
  } else {
    for (int64_t h = 0; h < desk->hidden; ++h) out[h] = 0.0f;
    for (; total > 0; --total) {
      int32_t from = 0, least = INT32_MAX;
      for (int32_t i = 0; i < desk->n; ++i) {
        const int32_t* ids = reinterpret_cast<const int32_t*>(calls[i] + 1);
        if (done[i] < calls[i]->count && ids[done[i]] <= least) from = i, least = ids[done[i]];
      }
      const char* rows = reinterpret_cast<const char*>(parts[from]);
      add_row(rows + done[from]++ * desk->hidden * desk->itemsize, desk->hidden, desk->itemsize, out);
    }
    good = all_finite(out, desk->hidden);
  }
  if (good) take(desk->ranks, desk->which, desk->n);
  return good;
}

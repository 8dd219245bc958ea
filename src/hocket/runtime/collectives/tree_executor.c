/* One rank's part of a planned collective over non-blocking stream sockets.
 *
 * Chunks climb their tree (each rank adds what its children send, in a fixed order, so that sums
 * are the same bits whatever arrives first) and descend it again. Of all that may be sent to a
 * peer the chunk with the lowest number goes first: numbers are priorities. State is in arrays of
 * the caller, so that a call may return after a slice of time and go on later.
 */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

typedef int64_t i64;
enum { DONE = 0, RUNNING = 1, CLOSED = 2, MISMATCH = 3 };
enum { HEADER = 8, MAX_RANKS = 1024 };

typedef struct {
    i64 num_ranks, num_chunks, kind, sequence, wake_fd, notify_fd;
    i64 wanted_finals, wanted_sends, last_chunk; /* last_chunk: confirms all others; -1: none */
    i64 *fd;
    i64 *chunk_tree, *chunk_start, *chunk_size, *chunk_at;
    i64 *up_parent, *up_ptr, *up_child, *scratch_at, *down_parent, *down_ptr, *down_child;
    i64 *ready_queue, *num_ready, *num_accepted;
    unsigned char *own, *final;
    i64 *added;
    uint64_t *arrived;
    i64 *heap_ptr, *heap_size, *heap_item;
    i64 *out_item, *out_done, *pending_in; /* pending_in: messages that a peer has yet to send */
    unsigned char *has_left;            /* whether a peer has closed its end */
    uint32_t *in_header;
    i64 *in_header_done, *in_body_done;
    i64 *num_finals, *num_sends, *bytes_out, *bytes_in, *failed_peer;
    unsigned char *data, *scratch;
} TreeRun;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void push(TreeRun *s, i64 peer, i64 item) {
    i64 *heap = s->heap_item + s->heap_ptr[peer], at = s->heap_size[peer]++;
    while (at > 0 && heap[(at - 1) / 2] > item) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = item;
}

static i64 pop(TreeRun *s, i64 peer) {
    i64 *heap = s->heap_item + s->heap_ptr[peer], top = heap[0], size = --s->heap_size[peer];
    i64 item = heap[size], at = 0, below;
    while ((below = 2 * at + 1) < size) {
        if (below + 1 < size && heap[below + 1] < heap[below]) below++;
        if (item <= heap[below]) break;
        heap[at] = heap[below];
        at = below;
    }
    heap[at] = item;
    return top;
}

#define ADD(T)                                                      \
    {                                                               \
        T *restrict a = (T *)into;                                  \
        const T *restrict b = (const T *)from;                      \
        for (i64 i = 0, n = size / (i64)sizeof(T); i < n; i++) a[i] += b[i]; \
    }

/* Upper halves of floats: added as floats, rounded to the nearest, ties to even. */
static void add_bfloat16(uint16_t *restrict a, const uint16_t *restrict b, i64 n) {
    for (i64 i = 0; i < n; i++) {
        union { uint32_t bits; float value; } x = {(uint32_t)a[i] << 16}, y = {(uint32_t)b[i] << 16};
        x.value += y.value;
        uint32_t rounded = x.bits + 0x7fff + (x.bits >> 16 & 1);
        a[i] = x.value != x.value ? 0x7fc0 : (uint16_t)(rounded >> 16);
    }
}

static void add(i64 kind, void *into, const void *from, i64 size) {
    switch (kind) {
    case 0: ADD(float) break;
    case 1: ADD(double) break;
    case 2: ADD(int32_t) break;
    case 3: ADD(i64) break;
    case 4: add_bfloat16((uint16_t *)into, (const uint16_t *)from, size / 2); break;
    }
}

static void advance(TreeRun *s, i64 chunk);

static void finish(TreeRun *s, i64 chunk) {
    i64 tree = s->chunk_tree[chunk];
    s->final[chunk] = 1;
    ++*s->num_finals;
    for (i64 e = s->down_ptr[tree]; e < s->down_ptr[tree + 1]; e++)
        push(s, s->down_child[e], 2 * chunk + 1);
    if (s->notify_fd >= 0) {
        uint64_t one = 1;
        if (write((int)s->notify_fd, &one, 8) < 0) return; /* full: whoever reads will look anyway */
    }
    if (s->last_chunk >= 0 && chunk != s->last_chunk && *s->num_finals == s->last_chunk) {
        s->own[s->last_chunk] = 1;
        advance(s, s->last_chunk);
    }
}

/* Add what has arrived, in the order of the children, and pass the sum on when it is whole. */
static void advance(TreeRun *s, i64 chunk) {
    i64 tree = s->chunk_tree[chunk], first = s->up_ptr[tree], count = s->up_ptr[tree + 1] - first;
    if (!s->own[chunk]) return;
    while (s->added[chunk] < count && (s->arrived[chunk] >> s->added[chunk] & 1)) {
        i64 child = first + s->added[chunk]++;
        add(s->kind, s->data + s->chunk_start[chunk],
            s->scratch + s->scratch_at[child] + s->chunk_at[chunk], s->chunk_size[chunk]);
    }
    if (s->added[chunk] < count) return;
    s->added[chunk]++; /* never here again */
    if (s->up_parent[tree] >= 0)
        push(s, s->up_parent[tree], 2 * chunk);
    else if (s->down_parent[tree] < 0)
        finish(s, chunk);
}

static void accept_ready(TreeRun *s) {
    i64 num = __atomic_load_n(s->num_ready, __ATOMIC_ACQUIRE);
    while (*s->num_accepted < num) {
        i64 chunk = s->ready_queue[(*s->num_accepted)++];
        s->own[chunk] = 1;
        advance(s, chunk);
    }
}

static int send_some(TreeRun *s, i64 peer) {
    while (s->out_item[peer] >= 0 || s->heap_size[peer] > 0) {
        if (s->out_item[peer] < 0) {
            s->out_item[peer] = pop(s, peer);
            s->out_done[peer] = 0;
        }
        i64 item = s->out_item[peer], chunk = item >> 1, done = s->out_done[peer];
        uint32_t header[2] = {(uint32_t)s->sequence, (uint32_t)item};
        struct iovec parts[2] = {{header, HEADER},
                                 {s->data + s->chunk_start[chunk], s->chunk_size[chunk]}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        if (done < HEADER) {
            parts[0].iov_base = (char *)header + done;
            parts[0].iov_len = HEADER - done;
        } else {
            parts[0].iov_len = 0;
            parts[1].iov_base = (char *)parts[1].iov_base + (done - HEADER);
            parts[1].iov_len -= done - HEADER;
        }
        ssize_t sent = sendmsg((int)s->fd[peer], &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) return errno == EAGAIN || errno == EINTR ? DONE : CLOSED;
        s->bytes_out[peer] += sent;
        s->out_done[peer] += sent;
        if (s->out_done[peer] == HEADER + s->chunk_size[chunk]) {
            s->out_item[peer] = -1;
            ++*s->num_sends;
        }
    }
    return DONE;
}

/* Where the body of the message under way belongs; NULL where the header makes no sense. */
static unsigned char *place(TreeRun *s, i64 peer, i64 chunk, int is_down, i64 *child) {
    if (chunk >= s->num_chunks) return 0;
    i64 tree = s->chunk_tree[chunk];
    if (is_down) return s->down_parent[tree] == peer ? s->data + s->chunk_start[chunk] : 0;
    for (i64 e = s->up_ptr[tree]; e < s->up_ptr[tree + 1]; e++)
        if (s->up_child[e] == peer) {
            *child = e - s->up_ptr[tree];
            return s->scratch + s->scratch_at[e] + s->chunk_at[chunk];
        }
    return 0;
}

static int is_paused(const TreeRun *s, i64 peer) { /* what it says belongs to a later collective */
    return s->in_header_done[peer] == HEADER &&
           s->in_header[2 * peer] >> 16 != (uint32_t)s->sequence >> 16;
}

/* A peer that has done its part may leave before the others have done theirs. */
static int ended(TreeRun *s, i64 peer) {
    s->has_left[peer] = 1;
    return s->pending_in[peer] > 0 || s->in_header_done[peer] > 0 ? CLOSED : DONE;
}

static int receive_some(TreeRun *s, i64 peer) {
    for (int turn = 0; turn < 64; turn++) {
        ssize_t got;
        if (s->in_header_done[peer] < HEADER) {
            char *into = (char *)(s->in_header + 2 * peer) + s->in_header_done[peer];
            got = recv((int)s->fd[peer], into, HEADER - s->in_header_done[peer], MSG_DONTWAIT);
            if (got == 0) return ended(s, peer);
            if (got < 0) return errno == EAGAIN || errno == EINTR ? DONE : ended(s, peer);
            s->bytes_in[peer] += got;
            if ((s->in_header_done[peer] += got) < HEADER) continue;
            s->in_body_done[peer] = 0;
        }
        if (is_paused(s, peer)) return DONE;
        if (s->in_header[2 * peer] != (uint32_t)s->sequence) return MISMATCH; /* other chunks */
        uint32_t item = s->in_header[2 * peer + 1];
        i64 chunk = item >> 1, child = -1;
        unsigned char *into = place(s, peer, chunk, item & 1, &child);
        if (!into) return MISMATCH;
        i64 rest = s->chunk_size[chunk] - s->in_body_done[peer];
        if (rest > 0) {
            got = recv((int)s->fd[peer], into + s->in_body_done[peer], rest, MSG_DONTWAIT);
            if (got == 0) return CLOSED;
            if (got < 0) return errno == EAGAIN || errno == EINTR ? DONE : CLOSED;
            s->in_body_done[peer] += got;
            s->bytes_in[peer] += got;
            if (got < rest) continue;
        }
        s->in_header_done[peer] = 0;
        s->pending_in[peer]--;
        if (child < 0)
            finish(s, chunk);
        else {
            s->arrived[chunk] |= (uint64_t)1 << child;
            advance(s, chunk);
        }
    }
    return DONE;
}

int run_trees(TreeRun *s, double slice_s) {
    static _Thread_local struct pollfd polled[MAX_RANKS + 1];
    double end_s = now_s() + slice_s;
    for (i64 peer = 0; peer < s->num_ranks; peer++) { /* what came during the last one */
        if (s->has_left[peer] && s->pending_in[peer] > 0) return *s->failed_peer = peer, CLOSED;
        if (s->fd[peer] >= 0 && s->in_header_done[peer] == HEADER) {
            int state = receive_some(s, peer);
            if (state != DONE) return *s->failed_peer = peer, state;
        }
    }
    for (;;) {
        accept_ready(s);
        if (*s->num_finals == s->wanted_finals && *s->num_sends == s->wanted_sends) return DONE;
        for (i64 peer = 0; peer < s->num_ranks; peer++) {
            int wants = s->out_item[peer] >= 0 || s->heap_size[peer] > 0;
            int hears = !is_paused(s, peer) && !s->has_left[peer];
            int events = (hears ? POLLIN : 0) | (wants ? POLLOUT : 0);
            polled[peer] = (struct pollfd){events ? (int)s->fd[peer] : -1, (short)events, 0};
        }
        polled[s->num_ranks] = (struct pollfd){(int)s->wake_fd, POLLIN, 0};
        double before_s = now_s();
        if (before_s >= end_s) return RUNNING;
        poll(polled, s->num_ranks + 1, (int)(1e3 * (end_s - before_s)) + 1);
        if (polled[s->num_ranks].revents & POLLIN) {
            uint64_t count;
            if (read((int)s->wake_fd, &count, 8) < 0 && errno != EAGAIN) return MISMATCH;
        }
        for (i64 peer = 0; peer < s->num_ranks; peer++) {
            int state = DONE;
            if ((polled[peer].revents & (POLLIN | POLLHUP | POLLERR)) && !s->has_left[peer])
                state = receive_some(s, peer);
            if (state == DONE && (polled[peer].revents & (POLLOUT | POLLHUP | POLLERR))) state = send_some(s, peer);
            if (state != DONE) return *s->failed_peer = peer, state;
        }
    }
}

/* A switch that joins network namespaces by links of a given delay and rate.
 *
 *     switch NAMESPACE...        (then lines "DELAY_US RATE_MBIT" on its standard input, also while it runs)
 *
 * Kernels without netem cannot delay; this can, in user space. Namespace number i gets a TAP device eth0 with the
 * address 10.77.0.(i+1). "ready" is printed once all are up. It ends, and the devices with it, when its input ends.
 *
 * The model: every namespace has one full-duplex port. What it sends waits in a queue for each destination, which take
 * turns, is serialised at the link's rate, travels for the delay, and is serialised again at the receiver's port in the
 * order of arrival, cut through: a single packet on idle links takes size / rate + delay. Nothing is lost. Pure TCP
 * acknowledgements pay the delay only. A rate of 0 is no limit. The kernel hands over TCP segments of up to 64 KB
 * unsplit (TSO), so the links take turns in such pieces.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_PORTS = 32,
    MTU = 9000,
    ETHERNET_HEADER = 14,
    LARGEST = 70000,          /* bytes of a frame with TSO, and then some */
    READS_A_TURN = 32,        /* so that one port cannot keep the others waiting */
    OFFLOAD_HEADER = sizeof(struct virtio_net_hdr),
};
static const int64_t NEVER = INT64_MAX, SECOND = 1000000000;

typedef struct packet {
    struct packet *next;
    int64_t time;             /* ns: when it came; then when it has arrived; then when it is to be delivered */
    int length, destination;
    unsigned char frame[];    /* behind the offload header */
} Packet;

typedef struct {
    Packet *first, *last;
} Queue;

typedef struct {
    int tap;
    Queue leaving[MAX_PORTS]; /* by destination */
    int turn;                 /* the destination that was served last */
    int64_t out_free, in_free;/* ns: when each direction's link is idle again */
    Queue travelling;         /* from this port */
    Queue arriving;           /* at this port */
} Port;

static Port ports[MAX_PORTS];
static int port_count;
static Queue acknowledgements;
static int64_t delay_ns;
static double ns_per_byte;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

static int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t serialisation(const Packet *packet) { return (int64_t)(packet->length * ns_per_byte); }

static void push(Queue *queue, Packet *packet) {
    packet->next = NULL;
    if (queue->last)
        queue->last->next = packet;
    else
        queue->first = packet;
    queue->last = packet;
}

static Packet *pop(Queue *queue) {
    Packet *packet = queue->first;
    queue->first = packet->next;
    if (!queue->first)
        queue->last = NULL;
    return packet;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* Whether an Ethernet frame is a TCP segment without data. */
static int is_pure_acknowledgement(const unsigned char *frame, int length) {
    const unsigned char *ip = frame + ETHERNET_HEADER;
    if (length < ETHERNET_HEADER + 40 || frame[12] != 0x08 || frame[13] != 0x00 || ip[9] != 6)
        return 0;
    int ip_header = (ip[0] & 15) * 4, total = ip[2] << 8 | ip[3];
    int tcp_header = (ip[ip_header + 12] >> 4) * 4;
    return total == ip_header + tcp_header;
}

/* The destination whose turn it is to leave a port, or -1. */
static int next_destination(const Port *port) {
    for (int step = 1; step <= port_count; step++) {
        int destination = (port->turn + step) % port_count;
        if (port->leaving[destination].first)
            return destination;
    }
    return -1;
}

/* Put on the link what it has room for; returns when it has room again for what still waits. */
static int64_t send_from(Port *port, int64_t time) {
    int destination;
    while ((destination = next_destination(port)) >= 0) {
        if (port->out_free > time)
            return port->out_free;
        Packet *packet = pop(&port->leaving[destination]);
        port->turn = destination;
        port->out_free = later(packet->time, port->out_free) + serialisation(packet);
        packet->time = port->out_free + delay_ns;
        push(&port->travelling, packet);
    }
    return NEVER;
}

/* Queue at their receivers' ports the packets that have arrived, in the order of arrival. */
static void arrive(int64_t time) {
    for (;;) {
        Port *source = NULL;
        for (int i = 0; i < port_count; i++) {
            Packet *packet = ports[i].travelling.first;
            if (packet && packet->time <= time && (!source || packet->time < source->travelling.first->time))
                source = &ports[i];
        }
        if (!source)
            return;
        Packet *packet = pop(&source->travelling);
        Port *receiver = &ports[packet->destination];
        int64_t size = serialisation(packet);
        receiver->in_free = later(packet->time - size, receiver->in_free) + size;
        packet->time = receiver->in_free;
        push(&receiver->arriving, packet);
    }
}

/* Hand over what is due; returns when the next one is. */
static int64_t deliver(Queue *queue, int64_t time) {
    while (queue->first && queue->first->time <= time) {
        Packet *packet = pop(queue);
        if (write(ports[packet->destination].tap, packet->frame, packet->length) < 0 && errno != EAGAIN)
            perror("a frame was lost");
        free(packet);
    }
    return queue->first ? queue->first->time : NEVER;
}

/* Do all that is due; returns when there is something to do next. */
static int64_t advance(int64_t time) {
    int64_t next = NEVER;
    for (int i = 0; i < port_count; i++)
        next = earlier(next, send_from(&ports[i], time));
    arrive(time);
    for (int i = 0; i < port_count; i++) {
        next = earlier(next, deliver(&ports[i].arriving, time));
        if (ports[i].travelling.first)
            next = earlier(next, ports[i].travelling.first->time);
    }
    return earlier(next, deliver(&acknowledgements, time));
}

/* Queue a copy of a frame, offload header in front, for one destination. */
static void enqueue(Port *source, int destination, const unsigned char *frame, int length) {
    Packet *packet = malloc(sizeof *packet + length);
    if (!packet)
        fail("malloc");
    memcpy(packet->frame, frame, length);
    packet->length = length;
    packet->destination = destination;
    packet->time = now();
    if (is_pure_acknowledgement(frame + OFFLOAD_HEADER, length - OFFLOAD_HEADER)) {
        packet->time += delay_ns;
        push(&acknowledgements, packet);
    } else {
        push(&source->leaving[destination], packet);
    }
}

/* Take what a namespace sends: addresses end in the port's number from 1; the lowest bit of the first byte means all. */
static void take_from(int number) {
    static unsigned char frame[LARGEST];
    for (int i = 0; i < READS_A_TURN; i++) {
        int length = read(ports[number].tap, frame, sizeof frame);
        if (length < OFFLOAD_HEADER + ETHERNET_HEADER)
            return;
        const unsigned char *address = frame + OFFLOAD_HEADER;
        for (int destination = 0; destination < port_count; destination++)
            if (destination != number && (address[0] & 1 || address[5] == destination + 1))
                enqueue(&ports[number], destination, frame, length);
    }
}

/* Take lines "DELAY_US RATE_MBIT"; returns 0 when the input has ended. */
static int take_links(void) {
    static char text[4096];
    static size_t used;
    ssize_t length = read(STDIN_FILENO, text + used, sizeof text - 1 - used);
    if (length <= 0)
        return 0;
    used += length;
    text[used] = '\0';
    char *line = text, *end;
    for (; (end = strchr(line, '\n')); line = end + 1) {
        double delay_us, rate_mbit;
        if (sscanf(line, "%lf %lf", &delay_us, &rate_mbit) != 2 || delay_us < 0 || rate_mbit < 0) {
            fprintf(stderr, "expected DELAY_US RATE_MBIT, got %.*s\n", (int)(end - line), line);
            exit(2);
        }
        delay_ns = (int64_t)(delay_us * 1000);
        ns_per_byte = rate_mbit > 0 ? 8000 / rate_mbit : 0;
    }
    used -= line - text;
    memmove(text, line, used);
    return 1;
}

/* Make eth0 in a namespace and leave this process in it. */
static int open_tap(const char *namespace, int number) {
    char text[512];
    snprintf(text, sizeof text, "/run/netns/%s", namespace);
    int entered = open(text, O_RDONLY | O_CLOEXEC);
    if (entered < 0 || setns(entered, CLONE_NEWNET))
        fail(text);
    close(entered);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    strcpy(request.ifr_name, "eth0");
    if (tap < 0 || ioctl(tap, TUNSETIFF, &request))
        fail("/dev/net/tun");
    if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6))
        fail("TUNSETOFFLOAD");
    snprintf(text, sizeof text,
             "ip link set eth0 address 02:77:00:00:00:%02x mtu %d txqueuelen 10000 && ip addr add 10.77.0.%d/24 dev eth0 "
             "&& ip link set eth0 up", number + 1, MTU, number + 1);
    if (system(text))
        exit(1);
    return tap;
}

int main(int count, char **names) {
    port_count = count - 1;
    if (port_count < 1 || port_count > MAX_PORTS) {
        fprintf(stderr, "usage: switch NAMESPACE...   (1 to %d)\n", MAX_PORTS);
        return 2;
    }
    struct pollfd inputs[MAX_PORTS + 1];
    for (int i = 0; i < port_count; i++) {
        ports[i].tap = open_tap(names[i + 1], i);
        inputs[i] = (struct pollfd){.fd = ports[i].tap, .events = POLLIN};
    }
    inputs[port_count] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    prctl(PR_SET_TIMERSLACK, 1);
    if (sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1}))
        perror("no real-time priority: delays will be longer under load");
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t next = advance(now()), wait = next == NEVER ? SECOND : later(next - now(), 0);
        struct timespec timeout = {wait / SECOND, wait % SECOND};
        if (ppoll(inputs, port_count + 1, &timeout, NULL) <= 0)
            continue;
        for (int i = 0; i < port_count; i++)
            if (inputs[i].revents & POLLIN)
                take_from(i);
        if (inputs[port_count].revents && !take_links())
            return 0;
    }
}

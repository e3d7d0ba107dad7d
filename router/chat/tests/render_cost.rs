//! What renderings cost: allocations, which do not depend on the machine.
#![expect(
    clippy::unwrap_used,
    unsafe_code,
    reason = "a test without a test module, which counts allocations"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use warmroute_chat::openai::{PromptRoute, PromptSource, parse};
use warmroute_chat::tokenize::{ChatTemplates, CivilTime, RenderBound, RenderError, RenderLimits};

/// The most members that are accepted.
const MEMBERS_MAX: usize = 1024;

/// What the router charges for each byte of a chat.
const MEMORY_OF_BYTE_MAX: usize = 12;
/// What it does not charge.
const MEMORY_ALLOWED: usize = 8 << 20;

thread_local! {
    static COST: Cell<Cost> = const { Cell::new(Cost { allocations: 0, bytes: 0 }) };
    static MEMORY: Cell<Memory> = const { Cell::new(Memory { held: 0, peak: 0 }) };
}

/// Bytes that this thread holds, and held at most.
#[derive(Clone, Copy, Debug)]
struct Memory {
    held: usize,
    peak: usize,
}

/// What this thread has allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    allocations: usize,
    bytes: usize,
}

impl Cost {
    fn since(self, before: Self) -> Self {
        Self {
            allocations: self.allocations - before.allocations,
            bytes: self.bytes - before.bytes,
        }
    }
}

struct CountingAllocator;

fn count(bytes: usize, freed: usize) {
    let _counted = MEMORY.try_with(|memory| {
        let Memory { held, peak } = memory.get();
        // What another thread allocated may be freed here.
        let held = (held + bytes).saturating_sub(freed);
        let peak = peak.max(held);
        memory.set(Memory { held, peak });
    });
    if bytes == 0 {
        return;
    }
    // A thread that ends has no counter left.
    let _counted = COST.try_with(|cost| {
        let Cost {
            allocations,
            bytes: before,
        } = cost.get();
        cost.set(Cost {
            allocations: allocations + 1,
            bytes: before + bytes,
        });
    });
}

// SAFETY: calls the system's allocator with what it was given.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: the caller's pointer and layout.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller's pointer and layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The result and the cost of rendering a chat whose arguments have so many members.
fn render(templates: &ChatTemplates, members: usize) -> (Result<String, RenderError>, Cost) {
    let kwargs: Vec<String> = (0..members).map(|i| format!("\"k{i}\":[{i}]")).collect();
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{{{}}}}}"#,
        kwargs.join(",")
    );
    let request = parse(PromptRoute::ChatCompletions, body.as_bytes()).unwrap();
    let PromptSource::Chat(parts) = &request.prompt else {
        panic!("a chat is a chat")
    };
    let before = COST.get();
    let text = templates.render(parts, CivilTime::from_unix(0));
    (text, COST.get().since(before))
}

#[test]
fn accepted_kwargs_cost_linear_work_and_refused_ones_a_constant() {
    let source = "{{ messages[0].content }}".to_owned();
    let templates = ChatTemplates::single(source, BTreeMap::new()).unwrap();
    let costs = [MEMBERS_MAX / 4, MEMBERS_MAX / 2, MEMBERS_MAX].map(|members| {
        let (text, cost) = render(&templates, members);
        assert_eq!(text.as_deref(), Ok("x"));
        println!("{members} members: {cost:?}");
        cost
    });
    // Twice the members add at most twice as much; the rest is room for a map that has grown.
    let [first, second] = [costs[1].since(costs[0]), costs[2].since(costs[1])];
    assert!(first.allocations > MEMBERS_MAX / 4, "members are copied");
    assert!(second.allocations <= first.allocations * 5 / 2);
    assert!(second.bytes <= first.bytes * 3);
    let too_many = RenderError::TooManyMembers {
        name: "chat_template_kwargs",
        max: MEMBERS_MAX,
    };
    let refused = [MEMBERS_MAX + 1, 10_000, 300_000].map(|members| {
        let (text, cost) = render(&templates, members);
        assert_eq!(text, Err(too_many.clone()));
        println!("{members} members: {cost:?}");
        cost
    });
    assert!(refused[0].allocations <= costs[2].allocations);
    assert_eq!([refused[0]; 3], refused, "members above the bound cost");
}

/// Indentation once made twenty bytes of each, and a copy of them.
#[test]
fn printed_json_takes_no_more_memory_than_is_charged() {
    const DEPTH: usize = 110;
    let source = include_str!("../testdata/templates/llama31_tools.jinja").to_owned();
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let templates = ChatTemplates::single(source, tokens).unwrap();
    let render = |strings: usize, depth: usize| {
        let strings = vec![r#""abcdefghijklmnopqrs""#; strings].join(",");
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":"x"}}],"tools":[{{"type":"function",
            "function":{{"name":"f","parameters":{open}{strings}{close}}}}}]}}"#
        );
        let request = parse(PromptRoute::ChatCompletions, body.as_bytes()).unwrap();
        let PromptSource::Chat(parts) = &request.prompt else {
            panic!("a chat is a chat")
        };
        let held = MEMORY.get().held;
        MEMORY.set(Memory { held, peak: held });
        let text = templates.render(parts, CivilTime::from_unix(0));
        let peak = MEMORY.get().peak - held;
        println!(
            "{} bytes: {peak}, {} bytes of text",
            body.len(),
            text.as_ref().map_or(0, String::len)
        );
        let charged = body.len() * MEMORY_OF_BYTE_MAX;
        assert!(peak <= charged.max(MEMORY_ALLOWED), "{peak}");
        text
    };
    let refused = render(90_000, DEPTH);
    assert!(
        matches!(refused, Err(RenderError::Template(_))),
        "{refused:?}"
    );
    // What real tools take is printed.
    assert!(render(90_000, 2).unwrap().len() > 90_000 * 30);
    assert!(render(900, DEPTH).unwrap().len() > 900 * 400);
}

/// So many system messages of 89 bytes, rendered until the text is no longer wanted: at the call of
/// that number.
fn render_systems(
    source: &str,
    messages: usize,
    bound: RenderBound,
    ends: usize,
) -> (Result<String, RenderError>, Cost) {
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let templates = ChatTemplates::single(source.to_owned(), tokens).unwrap();
    let message = format!(r#"{{"role":"system","content":"{}"}}"#, "x".repeat(89));
    let body = format!(r#"{{"messages":[{}]}}"#, vec![message; messages].join(","));
    let request = parse(PromptRoute::ChatCompletions, body.as_bytes()).unwrap();
    let PromptSource::Chat(parts) = &request.prompt else {
        panic!("a chat is a chat")
    };
    let asked = AtomicUsize::new(0);
    let limits = RenderLimits {
        bound,
        is_cancelled: Arc::new(move || asked.fetch_add(1, Ordering::Relaxed) + 1 >= ends),
    };
    let before = COST.get();
    let text = templates.render_within(parts, CivilTime::from_unix(0), limits);
    (text, COST.get().since(before))
}

/// Each copies all of the text so far in a loop over the messages, which prints nothing.
const GROWING: [&str; 4] = [
    include_str!("../testdata/templates/deepseek.jinja"),
    "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t ~ m.content %}{% endfor %}",
    "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t %}{{ n.t }}{{ m.content }}\
     {% endset %}{% endfor %}",
    "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = [n.t, m.content] | join %}\
     {% endfor %}",
];

#[test]
fn a_text_that_grows_with_each_message_ends_at_a_bound_of_bytes() {
    for source in GROWING {
        for (bound, messages, bytes_max) in [
            (RenderBound::Short, 1_000, 64 << 20),
            (RenderBound::Long, 8_000, 1 << 30),
        ] {
            let (text, cost) = render_systems(source, messages, bound, usize::MAX);
            println!("{messages} messages: {cost:?}");
            assert_eq!(text, Err(RenderError::TooLong), "{source}");
            assert!(cost.bytes < bytes_max, "{cost:?}: {source}");
        }
        let (text, _) = render_systems(source, 200, RenderBound::Short, usize::MAX);
        assert!(text.is_ok(), "{text:?}: {source}");
    }
}

#[test]
fn a_text_that_is_no_longer_wanted_ends_in_the_next_turn_of_a_loop() {
    let only_loop = "{% for m in messages %}{% if m.role == 'user' %}{% endif %}{% endfor %}";
    for source in GROWING.into_iter().chain([only_loop]) {
        let ended = render_systems(source, 2_000, RenderBound::Long, 10);
        let (first, _) = render_systems(source, 2_000, RenderBound::Long, 1);
        println!("{:?}", ended.1);
        assert!(
            matches!(ended.0, Err(RenderError::Template(_))),
            "{ended:?}"
        );
        assert!(matches!(first, Err(RenderError::Template(_))), "{first:?}");
        // Reading the body takes most of it.
        assert!(ended.1.bytes < 4 << 20, "{ended:?}: {source}");
    }
}

//! What `chat_template_kwargs` cost: allocations, which do not depend on the machine.
#![expect(
    clippy::unwrap_used,
    unsafe_code,
    reason = "a test without a test module, which counts allocations"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;

use warmroute_chat::openai::{PromptRoute, PromptSource, parse};
use warmroute_chat::tokenize::{ChatTemplates, CivilTime, RenderError};

/// The most members that are accepted.
const MEMBERS_MAX: usize = 1024;

thread_local! {
    static COST: Cell<Cost> = const { Cell::new(Cost { allocations: 0, bytes: 0 }) };
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

fn count(bytes: usize) {
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
        count(layout.size());
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's pointer and layout.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
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

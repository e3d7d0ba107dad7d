use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use super::*;
use crate::PutIf;
use crate::faulty::{Fault, FaultyPlane};

fn text(event: RegistryEvent) -> String {
    match event {
        RegistryEvent::Put { key, entry } => format!("{key}={}", entry.revision.0),
        RegistryEvent::Gone { key } => format!("{key} gone"),
        RegistryEvent::Current => "current".to_owned(),
    }
}

#[test]
fn a_further_listing_reports_the_difference() {
    let mut image = RegistryImage::default();
    let put = |image: &mut RegistryImage, key: &str, revision| {
        let entry = RegistryEntry {
            value: Bytes::new(),
            revision: Revision(revision),
        };
        image.put(key.to_owned(), entry);
    };
    let drain =
        |image: &mut RegistryImage| -> Vec<String> { image.events.drain(..).map(text).collect() };
    image.begin_listing();
    put(&mut image, "x", 1);
    put(&mut image, "y", 3);
    image.end_listing();
    assert_eq!(drain(&mut image), ["x=1", "y=3", "current"]);
    put(&mut image, "z", 4);
    image.remove("w");
    image.begin_listing();
    put(&mut image, "x", 1);
    put(&mut image, "z", 7);
    image.end_listing();
    assert_eq!(drain(&mut image), ["z=4", "z=7", "y gone"]);
    image.begin_listing();
    image.end_listing();
    image.end_listing();
    assert_eq!(drain(&mut image), ["x gone", "z gone"]);
}

async fn put(plane: &FaultyPlane, key: &str) -> Revision {
    let put = plane.put(key.to_owned(), Bytes::new(), PutIf::Always, None);
    put.await.unwrap()
}

async fn next(watch: &mut RegistryWatch) -> String {
    let next = timeout(Duration::from_secs(60), watch.next()).await;
    text(next.expect("an event within a minute"))
}

#[tokio::test(start_paused = true)]
async fn present_keys_come_first_then_changes() {
    let plane = Arc::new(FaultyPlane::new());
    put(&plane, "w.a").await;
    put(&plane, "other").await;
    let mut watch = RegistryWatch::new(Arc::clone(&plane) as Arc<dyn Plane>, "w.".to_owned());
    assert_eq!(next(&mut watch).await, "w.a=1");
    assert_eq!(next(&mut watch).await, "current");
    let revision = put(&plane, "w.b").await;
    assert_eq!(next(&mut watch).await, "w.b=3");
    assert_eq!(watch.keys().collect::<Vec<_>>(), ["w.a", "w.b"]);
    plane.delete("w.b".to_owned(), revision).await.unwrap();
    assert_eq!(next(&mut watch).await, "w.b gone");
    assert_eq!(watch.keys().collect::<Vec<_>>(), ["w.a"]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_fails_or_ends_is_opened_again_and_reports_the_difference() {
    let plane = Arc::new(FaultyPlane::new());
    let gone = put(&plane, "w.gone").await;
    put(&plane, "w.stays").await;
    let mut watch = RegistryWatch::new(Arc::clone(&plane) as Arc<dyn Plane>, "w.".to_owned());
    plane.script(&[Fault::Refused, Fault::Refused, Fault::EndsAfter(3)]);
    let begun = Instant::now();
    assert_eq!(next(&mut watch).await, "w.gone=1");
    assert_eq!(begun.elapsed(), 2 * RETRY_DELAY);
    assert_eq!(next(&mut watch).await, "w.stays=2");
    assert_eq!(next(&mut watch).await, "current");
    plane.delete("w.gone".to_owned(), gone).await.unwrap();
    put(&plane, "w.new").await;
    assert_eq!(next(&mut watch).await, "w.new=3");
    assert_eq!(next(&mut watch).await, "w.gone gone");
    assert_eq!(begun.elapsed(), 3 * RETRY_DELAY);
}

/// A listing that breaks off removes nothing.
#[tokio::test(start_paused = true)]
async fn a_partial_listing_is_not_taken_for_the_whole() {
    let plane = Arc::new(FaultyPlane::new());
    for key in ["w.a", "w.b"] {
        put(&plane, key).await;
    }
    let mut watch = RegistryWatch::new(Arc::clone(&plane) as Arc<dyn Plane>, "w.".to_owned());
    plane.script(&[Fault::EndsAfter(3), Fault::EndsAfter(1)]);
    for event in ["w.a=1", "w.b=2", "current"] {
        assert_eq!(next(&mut watch).await, event);
    }
    put(&plane, "w.c").await;
    assert_eq!(next(&mut watch).await, "w.c=3");
}
